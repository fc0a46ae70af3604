"""What the torch that is here can do, if there is one."""

from __future__ import annotations

import pytest

from drumline.torch.register import too_old

try:
    import torch  # noqa: F401

    WHY_NOT = too_old()
except ImportError:
    WHY_NOT = "torch is not installed"

HAS_BACKENDS = not WHY_NOT

needs_backends = pytest.mark.skipif(not HAS_BACKENDS, reason=WHY_NOT or "torch has backends")
