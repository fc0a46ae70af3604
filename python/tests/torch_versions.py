"""The abilities of the installed torch."""

from __future__ import annotations

import pytest

from drumline.torch.register import too_old

try:
    import torch

    VERSION = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    WHY_NOT = too_old()
except ImportError:
    VERSION, WHY_NOT = (0, 0), "torch is not installed"

HAS_BACKENDS = not WHY_NOT

needs_split = pytest.mark.skipif(
    VERSION < (2, 15), reason="split_group of torch 2.14 wants an accelerator"
)
needs_backends = pytest.mark.skipif(not HAS_BACKENDS, reason=WHY_NOT or "torch has backends")
needs_torchrun = pytest.mark.skipif(
    VERSION < (2, 15), reason="docs/reference/launcher.md compares with torchrun 2.15"
)
