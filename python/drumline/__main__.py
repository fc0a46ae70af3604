"""``python -m drumline``: the command ``drumline``, in this process. The wheel also has it as a program of its own."""

from __future__ import annotations

import signal
import sys
from typing import NoReturn

from drumline import _core


def main() -> None:
    """``drumline run --nproc-per-node 2 -- python train.py``; ``drumline --help`` tells more."""
    run(sys.argv[1:])


def run(arguments: list[str]) -> NoReturn:
    """Carries out the command line and ends."""
    # The launcher has an answer to Ctrl-C, and Python's would come on top of it.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # The launcher starts this module again, once, to keep the ranks.
    itself = [sys.executable, "-m", "drumline"]
    sys.exit(_core.main(["drumline", *arguments], itself))


if __name__ == "__main__":
    main()
