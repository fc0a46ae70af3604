"""Checks the diffs that docs/start shows: python3 docs/check_diffs.py

In front of each block of ```diff stands which programs it is of, and how many lines it changes at most:

    <!-- diff of examples/one.rs and examples/many.rs: at most 3 lines -->
    <!-- diff to examples/many.rs: at most 3 lines -->

The programs are built and run by tests; of a page, those are its blocks of Rust that run. The first form shows everything in which they differ, imports and comments apart.
Context may be left out. In the second form, only the new side is compared with a program. A line that replaces another is
one changed line.
"""

from __future__ import annotations

import difflib
import pathlib
import re
import sys

DOCS = pathlib.Path(__file__).resolve().parent
ROOT = DOCS.parent

BLOCK = re.compile(r"^(?:<!-- diff (?:of (\S+) and|to) (\S+): at most (\d+) lines? -->\n)?```diff\n((?:.*\n)*?)^```$",
                   re.MULTILINE)
IMPORT = re.compile(r"^(?:pub )?use [^;]*;\n|^(?:import|from) .*\n", re.MULTILINE)
COMMENT = re.compile(r"^\s*(?://|#)[^\[\n]*\n|^\"\"\"(?:.|\n)*?\"\"\"\n|^\s*\n", re.MULTILINE)

RUNS = re.compile(r"^```rust(?:,no_run)?\n((?:.*\n)*?)^```$", re.MULTILINE)

# Lines that go, and those that come in their place.
Change = tuple[list[str], list[str]]


def program(name: str) -> str:
    text = (ROOT / name).read_text()
    return "".join(RUNS.findall(text)) if name.endswith(".md") else text


def code(text: str) -> list[str]:
    return COMMENT.sub("", IMPORT.sub("", text)).splitlines()


def changes(old: list[str], new: list[str]) -> list[Change]:
    steps = difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
    return [(old[a:b], new[c:d]) for kind, a, b, c, d in steps if kind != "equal"]


def count(changed: list[Change]) -> int:
    return sum(max(len(old), len(new)) for old, new in changed)


def sides(block: str) -> tuple[list[str], list[str]]:
    """What stands in the program before, and what afterwards."""
    lines = [(line[:1], line[1:] + "\n") for line in block.splitlines()]
    return (code("".join(line for mark, line in lines if mark != "+")),
            code("".join(line for mark, line in lines if mark != "-")))


def missing(shown: list[str], program: list[str]) -> str | None:
    """The first line of `shown` that `program` does not have behind those before it. Indentation does not count."""
    rest = iter([line.strip() for line in program])
    return next((line for line in shown if line.strip() not in rest), None)


def stripped(changed: list[Change]) -> list[tuple[str, str]]:
    """Every line with its sign, in any order."""
    return sorted((sign, line.strip()) for change in changed for sign, lines in zip("-+", change) for line in lines)


def problems_of(block: str, before: str | None, after: str, limit: int) -> list[str]:
    """`before` and `after` are the texts of the programs."""
    old, new = sides(block)
    shown = changes(old, new)
    real = changes(code(before), code(after)) if before is not None else shown
    problems = []
    if count(real) > limit:
        problems.append(f"changes {count(real)} lines, more than {limit}")
    for side, program in [(old, before), (new, after)]:
        if program is not None and (line := missing(side, code(program))):
            problems.append(f"the program has no `{line.strip()}` here")
    told = stripped(shown)
    return problems + [f"does not show the change `{sign}{line}`" for sign, line in stripped(real)
                       if (sign, line) not in told]


def of_page(page: pathlib.Path) -> list[str]:
    text, problems = page.read_text(), []
    for block in BLOCK.finditer(text):
        where = f"{page.relative_to(ROOT)}:{text.count(chr(10), 0, block.start(4))}"
        before, after, limit = block[1], block[2], block[3]
        if limit is None:
            problems.append(f"{where}: no comment says of which program this diff is")
            continue
        absent = [name for name in (before, after) if name and not (ROOT / name).is_file()]
        problems += [f"{where}: there is no {name}" for name in absent]
        if not absent:
            told = problems_of(block[4], before and program(before), program(after), int(limit))
            problems += [f"{where}: {problem}" for problem in told]
    return problems


def main() -> int:
    problems = [problem for page in sorted((DOCS / "start").glob("*.md")) for problem in of_page(page)]
    print("\n".join(problems), file=sys.stderr, end="\n" if problems else "")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
