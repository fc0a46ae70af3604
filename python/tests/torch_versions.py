"""What the torch that is here can do."""

from __future__ import annotations

import pytest

from drumline.torch.register import TORCH_MIN

torch = pytest.importorskip("torch")

VERSION = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
HAS_BACKENDS = VERSION >= TORCH_MIN

needs_backends = pytest.mark.skipif(
    not HAS_BACKENDS,
    reason=f"torch {torch.__version__} has no backends in Python, which came with "
    f"{'.'.join(map(str, TORCH_MIN))}",
)
