"""Programs that are written for other libraries."""

from __future__ import annotations

import os
import sys

_PACKAGES = os.path.join(os.path.dirname(__file__), "packages")


def folder(package: str) -> str:
    """The folder in which imports find drumline's package of this name."""
    return os.path.join(_PACKAGES, package)


def is_asked_for() -> bool:
    """Whether imports of this process look there."""
    return any(path.startswith(_PACKAGES) for path in sys.path)
