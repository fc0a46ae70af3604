"""Makes the models of all ranks start equal: the same tensors, with rank 0's values."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from drumline import _core
from drumline.torch.tensors import CODE, Staging

_BYTE = CODE[torch.uint8]


def parameters_of(module: torch.nn.Module, ignored: Iterable[str]) -> dict[str, Any]:
    """All parameters by name, each once, without the ignored ones."""
    skipped = set(ignored)
    return {name: it for name, it in module.named_parameters() if name not in skipped}


def buffers_of(module: torch.nn.Module, ignored: Iterable[str]) -> dict[str, Any]:
    """All buffers by name, at this moment: modules may replace them."""
    skipped = set(ignored)
    return {name: it for name, it in module.named_buffers() if name not in skipped}


def verify(
    group: _core.Group,
    parameters: dict[str, Any],
    buffers: dict[str, Any],
    bucket_bytes: int,
    ignores_unused: bool,
) -> None:
    """If models differ, raises DrumlineError on all ranks, with the tensor and the ranks."""
    _core.verify_model(
        group,
        [_spec(name, tensor) for name, tensor in parameters.items()],
        [_spec(name, tensor) for name, tensor in buffers.items()],
        bucket_bytes,
        ignores_unused,
    )


def _spec(name: str, tensor: Any) -> tuple[str, list[int], int]:
    # Gradients travel in the order of memory.
    if not tensor.is_contiguous():
        name = f"{name}, strides {tuple(tensor.stride())}"
    if tensor.requires_grad:
        name = f"{name}, requires_grad"
    code = CODE.get(tensor.dtype)
    if code is None:
        return f"{name}, {tensor.dtype}", [tensor.numel() * tensor.element_size()], _BYTE
    return name, list(tensor.shape), code


def broadcast(group: _core.Group, tensors: Iterable[Any], root: int = 0) -> None:
    """Gives all ranks the values of rank ``root``, without telling autograd."""
    staging = Staging()
    memories = [_bytes(staging, it.detach()) for it in tensors if it.numel() > 0]
    if root == 0:
        _core.broadcast(group, memories)
    else:
        for memory in memories:
            group.broadcast(memory, root)
    staging.finish()


def _bytes(staging: Staging, tensor: Any) -> _core.Memory:
    address, _, _, owner = staging.write(tensor)
    return address, tensor.numel() * tensor.element_size(), _BYTE, owner
