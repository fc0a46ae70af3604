"""Says in one line what `make test` left out on this machine, and why: python3 .ci/not_tested.py MPI ..."""

from __future__ import annotations

import os
import pathlib
import shutil
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent


def left_out(root: pathlib.Path, mpis: list[str]) -> list[str]:
    """What was not tested, each with the reason."""
    out = []
    if not (root / "target/torch-venv/installed").exists():
        said = root / "target/torch-venv/error.txt"
        lines = said.read_text().strip().splitlines() if said.exists() else []
        out.append(f"all that needs torch ({lines[-1] if lines else 'it was not installed'}; make torch-venv)")
    missing = [mpi for mpi in mpis if not (root / "target/mpi" / mpi / "installed").exists()]
    if missing and not os.environ.get("DRUMLINE_TEST_MPI"):
        out.append(f"MPI of {' and '.join(missing)} (pip could not install it)")
    if not (root / "target/python-venv/matplotlib").exists():
        out.append("what draws pictures (pip could not install matplotlib)")
    if not shutil.which(os.environ.get("CHROMIUM") or "chromium"):
        out.append("how pictures look (chromium is not here: apt-get install chromium fonts-dejavu-core)")
    return out


if __name__ == "__main__":
    print(f"not tested: {'; '.join(left_out(ROOT, sys.argv[1:])) or 'nothing'}")
