"""The abilities of the installed torch."""

from __future__ import annotations

import pytest

from drumline.torch.register import too_old, version_of

try:
    import torch

    VERSION = version_of(torch.__version__)
    WHY_NOT = too_old()
except ImportError:
    VERSION, WHY_NOT = (0, 0), "torch is not installed"

HAS_BACKENDS = not WHY_NOT

# What drumline can be for this torch: DRUMLINE_TORCH_BASE.
BASES = ["backend", "process-group"] if VERSION >= (2, 14) else ["process-group"]


def since(*version: int, what: str) -> pytest.MarkDecorator:
    """Skips a test where torch is older."""
    return pytest.mark.skipif(VERSION < version, reason=f"this torch has no {what}")


# Before, torch does not say of every call whether the program waits, so all run in the background.
TELLS_WHO_WAITS = VERSION >= (2, 7)

# Before, an event of the profiler must end on the thread on which it has begun.
EVENTS_ARE_ASYNC = VERSION >= (2, 14)

needs_split = since(2, 15, what="split_group without an accelerator")
needs_monitored_barrier = since(2, 14, what="monitored_barrier of other backends than gloo")
needs_entry_points = since(2, 5, what="entry points that it loads by itself")
needs_backends = pytest.mark.skipif(not HAS_BACKENDS, reason=WHY_NOT or "torch has backends")
needs_torchrun = pytest.mark.skipif(
    VERSION < (2, 15), reason="docs/reference/launcher.md compares with torchrun 2.15"
)
