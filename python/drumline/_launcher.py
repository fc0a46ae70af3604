"""The launcher as a child of another program: ``python -m drumline._launcher PARENT run ...``."""

from __future__ import annotations

import os
import sys

from drumline import _core
from drumline.__main__ import run


def main() -> None:
    """The command line ``drumline ...``, which ends with the process ``PARENT``."""
    parent = int(sys.argv[1])
    _core.end_with_parent(parent)
    if os.getppid() != parent:
        sys.exit(1)
    run(sys.argv[2:])


if __name__ == "__main__":
    main()
