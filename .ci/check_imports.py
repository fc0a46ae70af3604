"""Checks that arrows between crates point down, that no files of a crate import each other in a circle, that what is
uploaded has its licences, that files are opened in one place, and that no thread that serves writes to stdout or
stderr (see docs/inside/threads.md).

An import counts as an arrow to the file that defines the name: re-exports are followed. Tests are left out.
"""

import pathlib
import re
import sys

try:
    import tomllib
except ImportError:  # Python 3.10
    from pip._vendor import tomli as tomllib

ROOT = pathlib.Path(__file__).resolve().parent.parent

# A crate may use those in lines below its own.
FLOORS = [
    ["drumline-loom", "drumline-python"],
    ["drumline-cli", "drumline-fuzz", "drumline-sim"],
    ["drumline-bench", "drumline-burn", "drumline-candle", "drumline-conformance", "drumline-faults", "drumline-launch"],
    ["drumline"],
    ["drumline-accel", "drumline-testing"],
    ["drumline-train"],
    ["drumline-group"],
    ["drumline-trace"],
    ["drumline-engine", "drumline-inspect", "drumline-store"],
    ["drumline-cuda"],
    ["drumline-device", "drumline-error"],
    ["drumline-mpi", "drumline-schedule", "drumline-shm", "drumline-standin"],
    ["drumline-kernels", "drumline-loader"],
]
# Beside the manifest of a crate that is published.
UPLOADED = ["LICENSE-APACHE", "LICENSE-MIT", "README.md"]
# What opens a file. `drumline_shm::files` does so for all: what is at a path may be a pipe, or a link of another user.
OPENS = re.compile(r"\bfs::(?:read|read_to_string|write|copy)\b|\bFile::(?:open|create|options)\b|\bOpenOptions\b")
# These read what the kernel shows in /proc, /sys and /dev.
READ_THE_SYSTEM = {
    "drumline-bench": {"bench/measure"},
    "drumline-cli": {"check/system"},
    "drumline-cuda": {"opened"},
    "drumline-launch": {"devices", "foreign/ancestors", "keeper", "processes", "recipients", "signals", "waits", "watch/kernel"},
    "drumline-shm": {"cache", "forbidden", "nodes", "placement", "process", "this_host"},
    "drumline-trace": {"clock"},
    "drumline-train": {"checkpoint/memory"},
}
# These open a directory, to sync it, and a file that must not be there, which only its user may read.
OPEN_OTHERS = {("drumline-train", "checkpoint/disk"), ("drumline-cli", "secret")}
# drumline-launch has the most. The limit only falls.
LINES_MAX = 14_882

# In these crates threads serve. They write by way of an `Outlet`, which keeps nobody waiting, but for these files: the
# outlet, what subcommands print, and a keeper, whose stdout is a timer.
SERVING = ["cli", "engine", "group", "launch", "python", "shm", "store", "trace", "train"]
WRITES = re.compile(r"\b(?:e?print(?:ln)?!|dbg!|(?:io|stdio)::(?:stdout|stderr)\b|use std::io::\{[^}]*\bstd(?:out|err))")
MAY_WRITE = {"drumline-cli/src/output.rs", "drumline-launch/src/keep.rs", "drumline-trace/src/outlet.rs", "drumline-train/src/spawn/child.rs"}
# Their threads are theirs alone: they measure, simulate, or test.
OWN_THREADS = ["bench", "conformance", "faults", "fuzz", "inspect", "loom", "sim", "standin", "testing"]
STARTS = re.compile(r"\bthread::(?:spawn|Builder)\b")

# Circles that are still to be opened, by their first file. No other may come.
TO_OPEN: set[tuple[str, str]] = set()

Module = tuple[str, ...]


def use_tree(text: str) -> list[list[str]]:
    """The paths of `a::{b, c::{d, e as f}}`; a renamed leaf is `e as f`."""
    text = text.strip()
    brace = text.find("{")
    if brace < 0:
        return [[part.strip() for part in text.split("::") if part.strip()]]
    prefix = [part for part in text[:brace].strip().split("::") if part]
    depth, start, parts = 0, brace + 1, []
    for at, letter in enumerate(text[brace:], brace):
        depth += (letter == "{") - (letter == "}")
        if (letter == "," and depth == 1) or depth == 0:
            parts.append(text[start:at])
            start = at + 1
            if depth == 0:
                break
    return [prefix + path for part in parts if part.strip() for path in use_tree(part)]


def without_tests(text: str) -> str:
    """The code alone, without comments that fill a line."""
    text = re.sub(r"#\[cfg\((all\()?test.*?\)\]\s*mod \w+ \{.*", "", text, flags=re.S)
    return "\n".join(line for line in text.split("\n") if not line.strip().startswith("//"))


class Crate:
    """The files of one crate, what each defines, and what it imports."""

    def __init__(self, source: pathlib.Path) -> None:
        self.files: dict[Module, pathlib.Path] = {}
        for path in source.rglob("*.rs"):
            inside = path.relative_to(source)
            if path.name in ("tests.rs", "main.rs") or "tests" in inside.parts:
                continue
            module = tuple(inside.with_suffix("").parts)
            self.files[module[:-1] if module[-1] in ("mod", "lib") else module] = path
        self.defined: dict[Module, set[str]] = {}
        self.imported: dict[Module, dict[str, list[str]]] = {}
        self.globs: dict[Module, list[list[str]]] = {}
        self.paths: dict[Module, list[list[str]]] = {}
        self.openers: set[str] = set()
        for module, path in self.files.items():
            self.read(module, path.read_text())

    def read(self, module: Module, text: str) -> None:
        text = without_tests(text)
        if OPENS.search(text):
            self.openers.add("/".join(module))
        kinds = "struct|enum|trait|fn|const|type|static|union|macro_rules!"
        self.defined[module] = set(re.findall(rf"\b(?:{kinds})\s+(?:mut\s+)?(\w+)", text))
        self.imported[module], self.globs[module], self.paths[module] = {}, [], []
        uses = r"^\s*(pub(?:\([^)]*\))?\s+)?use\s+([^;]+);"
        for public, tree in re.findall(uses, text, flags=re.M):
            for path in use_tree(tree):
                name, _, alias = path[-1].partition(" as ")
                path = path[:-1] if name == "self" else [*path[:-1], name]
                if name == "*":
                    if public:
                        self.globs[module].append(path[:-1])
                elif path:
                    self.imported[module][alias or path[-1]] = path
                    self.paths[module].append(path)
        text = re.sub(uses, "", text, flags=re.M)
        self.paths[module] += [it.split("::") for it in re.findall(r"\b(?:crate|super|self)(?:::\w+)+", text)]
        for name, member in re.findall(r"(?<![\w:])([a-z_]\w*)::(\w+)", text):
            if name in self.imported[module] or (*module, name) in self.files:
                self.paths[module].append(["self", name, member])

    def absolute(self, module: Module, path: list[str]) -> list[str] | None:
        """The path from the crate's root; `None` for another crate's."""
        if path[0] == "crate":
            return path[1:]
        if path[0] == "self":
            return [*module, *path[1:]]
        if path[0] == "super":
            up = list(module)
            while path and path[0] == "super":
                up, path = up[:-1], path[1:]
            return up + path
        if (*module, path[0]) in self.files or path[0] in self.defined[module]:
            return [*module, *path]
        return None

    def home(self, path: list[str], seen: frozenset[tuple[Module, str]] = frozenset()) -> Module | None:
        """The file that defines the last name of an absolute path; `None` for a module or another crate's."""
        module: Module = ()
        for at, name in enumerate(path):
            if (*module, name) in self.files:
                module = (*module, name)
                continue
            if name in self.defined[module] or (module, name) in seen:
                return module
            seen |= {(module, name)}
            sources = [self.imported[module].get(name)] + [[*glob, name] for glob in self.globs[module]]
            for source in filter(None, sources):
                whole = self.absolute(module, source)
                found = whole and self.home(whole + path[at + 1 :], seen)
                if found is not None and found != []:
                    return found
            return None
        return None

    def arrows(self) -> dict[Module, set[Module]]:
        arrows: dict[Module, set[Module]] = {module: set() for module in self.files}
        for module, paths in self.paths.items():
            for path in paths:
                whole = self.absolute(module, path)
                home = self.home(whole) if whole else None
                if home is not None and home != module:
                    arrows[module].add(home)
        return arrows


def circles(arrows: dict[Module, set[Module]]) -> list[list[Module]]:
    """Files that reach each other."""

    def reach(start: Module) -> set[Module]:
        seen: set[Module] = set()
        todo = [start]
        while todo:
            for other in arrows[todo.pop()] - seen:
                seen.add(other)
                todo.append(other)
        return seen

    reached = {module: reach(module) for module in arrows}
    found: list[list[Module]] = []
    for module in sorted(arrows):
        circle = [other for other in sorted(arrows) if other in reached[module] and module in reached[other]]
        if circle and circle not in found:
            found.append(circle)
    return found


def threads(name: str, crate: Crate) -> list[str]:
    """What is wrong with how the files of a crate write and start threads."""
    problems, page = [], (ROOT / "docs/inside/threads.md").read_text()
    for path in crate.files.values():
        text, file = without_tests(path.read_text()), f"{name}/{path.relative_to(ROOT / 'crates' / name)}"
        short = name.removeprefix("drumline-")
        if short in SERVING and file not in MAY_WRITE and (found := WRITES.search(text)):
            problems.append(f"{file}: {found[0]} may block a thread that serves; drumline_trace::Outlet does not")
        if short not in OWN_THREADS and STARTS.search(text) and f"crates/{file})" not in page:
            problems.append(f"{file} starts a thread that docs/inside/threads.md does not have")
    return problems


def main() -> int:
    floor = {name: number for number, names in enumerate(FLOORS) for name in names}
    problems = []
    for folder in sorted((ROOT / "crates").iterdir()):
        name = folder.name
        manifest = tomllib.loads((folder / "Cargo.toml").read_text())
        used = [it for it in manifest.get("dependencies", {}) if it.startswith("drumline")]
        if name not in floor:
            problems.append(f"{name} stands on no floor of {pathlib.Path(__file__).name}")
            continue
        problems += [f"{name} uses {it}, which is not below it" for it in used if floor[it] <= floor[name]]
        if manifest["package"].get("publish", True):
            problems += [f"{name} has no {it}, which belongs to what is uploaded" for it in UPLOADED if not (folder / it).is_file()]
        crate = Crate(folder / "src")
        problems += threads(name, crate)
        lines = sum(len(path.read_text().splitlines()) for path in crate.files.values())
        if lines > LINES_MAX:
            problems.append(f"{name} has {lines} lines, more than {LINES_MAX}")
        may_open = READ_THE_SYSTEM.get(name, set()) | {it for crate_, it in OPEN_OTHERS if crate_ == name}
        if manifest["package"].get("publish", True):
            problems += [f"{name}: {it}.rs opens files by itself: drumline_shm::files does that" for it in sorted(crate.openers - may_open)]
        arrows = crate.arrows()
        for circle in circles(arrows):
            inside = [
                f"{'::'.join(module) or 'lib'} -> {', '.join('::'.join(it) or 'lib' for it in sorted(arrows[module] & set(circle)))}"
                for module in circle
            ]
            text = f"{name}: a circle of {len(circle)} files\n    " + "\n    ".join(inside)
            if (name, "::".join(circle[0])) in TO_OPEN:
                print(f"still to open: {text}")
            else:
                problems.append(text)
    print("\n".join(problems) or "no other circle, and no arrow that runs up")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
