"""The command ``drumline``: the launcher, in this process."""

from __future__ import annotations

import sys

from drumline import _core


def main() -> None:
    """``drumline run --nproc-per-node 2 -- python train.py``; ``drumline --help`` tells more."""
    # What the launcher starts for every rank: this again.
    itself = [sys.executable, "-m", "drumline"]
    sys.exit(_core.main(["drumline", *sys.argv[1:]], itself))


if __name__ == "__main__":
    main()
