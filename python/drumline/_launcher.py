"""The launcher as a child of another program: ``python -m drumline._launcher PARENT DIRECTORY run ...``."""

from __future__ import annotations

import os
import shutil
import sys

from drumline import _core
from drumline.__main__ import run


def main() -> None:
    """The command line ``drumline ...``, which ends with the process ``PARENT``, and removes its directory then."""
    parent, directory = int(sys.argv[1]), sys.argv[2]
    _core.end_with_parent(parent)
    if os.getppid() != parent:
        sys.exit(1)
    try:
        run(sys.argv[3:])
    finally:
        if os.getppid() != parent:
            shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main()
