"""Runs the tests on older versions of torch: ``python on_each_torch.py --wheel FOLDER [--only 2.8,2.11]``.

Each version gets an environment of its own, which is removed when its tests have ended. The results become the table
of docs/reference/versions.md; rows of versions that were not run stay. `make torch-versions` calls this.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTS = Path(__file__).parent
PAGE = ROOT / "docs/reference/versions.md"
SUITE = TESTS / "conformance/torch_conformance.py"
STANDIN = ROOT / "target/debug/libdrumline_standin.so"

# Each version, and what else its environment needs.
VERSIONS = {
    "2.4": "numpy<2", "2.5": "numpy<2", "2.6": "numpy", "2.8": "numpy", "2.11": "numpy", "2.13": "numpy",
    "2.14": "numpy", "2.15": "numpy",
}  # fmt: skip

# Libraries on top of torch, of the time of a version.
LIBRARIES = {"2.6": "accelerate==1.4.0 lightning==2.5.0.post0 torchmetrics==1.6.2 transformers==4.49.0"}


def tests_with_torch() -> list[str]:
    """The files with tests of the backend, and of drumline's own DistributedDataParallel."""
    files = sorted(TESTS.glob("test_*.py"))
    return [str(it) for it in files if it.name.startswith("test_ddp") or "torch_versions" in it.read_text()]


class Environment:
    """A torch of one version, with the package."""

    def __init__(self, version: str, args: argparse.Namespace) -> None:
        self.version, self.folder = version, Path(args.environments, version)
        self.python = str(self.folder / "bin/python")
        self.log = Path(args.environments, f"{version}.log")
        self.results = Path(args.environments, f"{version}.json")
        if not Path(self.python).exists():
            self.folder.parent.mkdir(parents=True, exist_ok=True)
            subprocess.run([sys.executable, "-m", "venv", str(self.folder)], check=True)
            needs = [f"torch=={version}.*", VERSIONS[version], "pytest", "cloudpickle", "expecttest"]
            needs += LIBRARIES.get(version, "").split()
            self.pip("install", *args.pip_args.split(), *needs)
        wheel = next(Path(args.wheel).glob("drumline-*.whl"))
        self.pip("install", "--quiet", "--no-index", "--no-deps", "--force-reinstall", str(wheel))

    def pip(self, *arguments: str) -> None:
        subprocess.run([self.python, "-m", "pip", *arguments], check=True)

    def run(self, *arguments: str) -> str:
        """The output of a Python program, which is added to the log."""
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": "/tmp"}
        environment["CARGO_TARGET_DIR"] = str(ROOT / "target")
        command = [sys.executable, str(ROOT / ".ci/own_environment.py"), self.python, *arguments]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        with self.log.open("a") as file:
            file.write(f"$ {' '.join(command)}\n{done.stdout}{done.stderr}\n")
        return done.stdout

    def tests(self, *files: str) -> str:
        """How many passed, failed and were left out."""
        said = self.run("-m", "pytest", "-p", "no:cacheprovider", *files).strip().splitlines()
        return re.sub(r" in [\d.]+s.*", "", said[-1].strip("= ")) if said else "they do not begin"

    def row(self) -> str:
        """The row of the table."""
        self.log.unlink(missing_ok=True)
        print(f"torch {self.version}: tests run, and {self.log} gets what they say", flush=True)
        about = "import sys, torch, numpy; print(torch.__version__, *sys.version_info[:2], numpy.__version__)"
        torch, major, minor, numpy = self.run("-c", about).split()
        counts = self.tests(*tests_with_torch())
        if libraries := LIBRARIES.get(self.version):
            counts += f"; with {libraries.replace(' ', ', ').replace('==', ' ')}: {self.tests(str(TESTS / 'ecosystem'))}"
        suite = ["--world-size", "2", "--exclude", "test_ddp_logging_data_cpu", "--quiet"]
        baseline = str(self.results)
        self.run(str(SUITE), "--backend", "gloo", *suite, "--json", baseline)
        ours = ["--backend", "drumline", "--register", "drumline.torch"]  # which torch 2.4 does not load by itself
        theirs = self.run(str(SUITE), *ours, *suite, "--passed-in", baseline, "--baseline", baseline)
        passed = [it["status"] for it in json.loads(self.results.read_text())["tests"].values()].count("pass")
        found = re.search(r"^(\d+) passed", theirs, re.MULTILINE)
        found_numpy = ".".join(numpy.split(".")[:2])
        return (
            f"| {torch.split('+')[0]} | {major}.{minor}, {found_numpy} | {counts} "
            f"| {found[1] if found else 0} of {passed} that gloo passes |"
        )


def write(rows: list[str]) -> None:
    """Puts the rows into the page, in order of versions."""
    text = PAGE.read_text()
    begin, end = "<!-- torch-versions -->\n", "\n<!-- end -->"
    head, _, rest = text.partition(begin)
    table, _, tail = rest.partition(end)
    title, line, *old = table.splitlines()
    by_version = {_version(row): row for row in [*old, *rows]}
    lines = [title, line, *(by_version[version] for version in sorted(by_version))]
    PAGE.write_text(head + begin + "\n".join(lines) + end + tail)


def _version(row: str) -> tuple[int, ...]:
    """The first two numbers of the version in a row."""
    return tuple(int(part) for part in row.split("|")[1].strip().split(".")[:2])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--wheel", required=True, help="the folder with the wheel of drumline")
    parser.add_argument("--only", default="", help="versions, with commas between them")
    parser.add_argument("--environments", default=str(ROOT / "target/torch-versions"))
    parser.add_argument("--keep", action="store_true", help="keep the environments, 5 GB each")
    parser.add_argument("--pip-args", default="", help="more arguments for pip")
    args = parser.parse_args()
    if not STANDIN.exists():
        sys.exit(f"{STANDIN} is not there, and stands in for a GPU: cargo build --locked -p drumline-standin")
    for version in args.only.split(",") if args.only else VERSIONS:
        environment = Environment(version, args)
        row = environment.row()
        print(row, flush=True)
        write([row])
        if not args.keep:
            shutil.rmtree(environment.folder)


if __name__ == "__main__":
    main()
