"""Builds all that a release uploads into dist/, and says what that is: python3 .ci/release.py [--rehearse]

It uploads nothing. It refuses a commit that must not be released, and stops where something cannot be built. To
rehearse, it goes on, and says at the end what it would have refused.
"""

from __future__ import annotations

import hashlib
import pathlib
import re
import shutil
import subprocess
import sys

try:
    import tomllib
except ImportError:  # Python 3.10
    from pip._vendor import tomli as tomllib

ROOT = pathlib.Path(__file__).resolve().parent.parent
DIST = ROOT / "dist"

# Each with its `make` target and what that makes.
STEPS = [
    ("package", ["target/package/*.crate"]),
    ("wheel-x86_64", ["target/wheels/manylinux/*x86_64.whl"]),
    ("wheel-aarch64", ["target/wheels/manylinux/*aarch64.whl"]),
    ("check-wheel", []),
    ("check-sdist", ["target/wheels/drumline-*.tar.gz"]),
    ("book", []),
]
GOES_TO = {".crate": "crates.io", ".whl": "PyPI", ".gz": "PyPI", ".tgz": "the book's site"}


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout


def refusals(package: dict[str, str]) -> list[str]:
    """Why this commit must not be released."""
    version = package["version"]
    found = []
    if changed := git("status", "--porcelain").splitlines():
        found.append(f"{len(changed)} files differ from the commit, the first is {changed[0][3:]}: commit or remove them")
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"].get("urls", {})
    if not package["repository"]:
        found.append("Cargo.toml has no repository: set it in [workspace.package]")
    elif urls.get("Repository") != package["repository"]:
        found.append("pyproject.toml does not name the repository of Cargo.toml: set Repository in [project.urls]")
    heading = re.search(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    if not heading or not re.fullmatch(rf"{re.escape(version)} - \d{{4}}-\d\d-\d\d", heading[1]):
        newest = heading[1] if heading else "nothing"
        found.append(f"CHANGELOG.md begins with {newest}: it must begin with {version} and a date, '{version} - YYYY-MM-DD'")
    here, tags = git("tag", "--points-at", "HEAD").split(), git("tag", "--list", "v*").split()
    if f"v{version}" in tags and f"v{version}" not in here:
        found.append(f"v{version} is the tag of another commit: raise the version in Cargo.toml")
    if others := [tag for tag in here if tag.startswith("v") and tag != f"v{version}"]:
        found.append(f"the commit has the tag {others[0]}, and Cargo.toml the version {version}")
    return found


def build(step: str, makes: list[str]) -> str | None:
    """Runs a step of the Makefile, and copies what it makes. Says what went wrong."""
    if subprocess.run(["make", "--no-print-directory", step], cwd=ROOT).returncode:
        return f"make {step} failed"
    for pattern in makes:
        if not (made := sorted(ROOT.glob(pattern))):
            return f"make {step} made no {pattern}"
        for path in made:
            shutil.copy(path, DIST)
    return None


def main(rehearse: bool) -> int:
    package = tomllib.loads((ROOT / "Cargo.toml").read_text())["workspace"]["package"]
    commit = git("rev-parse", "--short", "HEAD").strip()
    problems = refusals(package)
    if problems and not rehearse:
        print("not released:", *problems, sep="\n  ", file=sys.stderr)
        return 1
    shutil.rmtree(DIST, ignore_errors=True)
    DIST.mkdir()
    for step, makes in STEPS:
        problem = build(step, makes)
        if problem and not rehearse:
            print(f"not released: {problem}", file=sys.stderr)
            return 1
        problems += [problem] if problem else []
    if (book := ROOT / "target/book").is_dir():
        subprocess.run(["tar", "-czf", DIST / f"drumline-book-{package['version']}.tgz", "-C", book, "."], check=True)

    print(f"\ndrumline {package['version']}, commit {commit}. What a release would upload, from {DIST}:\n")
    sums = []
    for path in sorted(DIST.iterdir(), key=lambda path: (GOES_TO[path.suffix], path.name)):
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        sums.append(f"{digest}  {path.name}\n")
        print(f"{GOES_TO[path.suffix]:16}{path.stat().st_size:>12,} B  {digest}  {path.name}")
    (DIST / "SHA256SUMS").write_text("".join(sums))
    if problems:
        print("\na rehearsal, upload nothing of this:", *problems, sep="\n  ", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(rehearse="--rehearse" in sys.argv[1:]))
