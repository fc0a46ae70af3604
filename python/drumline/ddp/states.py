"""Makes the models of all ranks start equal: the same tensors, with rank 0's values."""

from __future__ import annotations

from collections.abc import Callable, Iterable
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


class AfterForward:
    """The buffers of one rank after a forward in training. An evaluation takes them and sends nothing, so that one rank
    may evaluate alone, and all ranks evaluate the same model."""

    def __init__(self) -> None:
        # By name: what this rank had, and what the other rank had.
        self._buffers: dict[str, tuple[Any, Any]] = {}

    def receive(
        self, buffers: dict[str, Any], is_source: bool, send: Callable[[list[Any]], None]
    ) -> None:
        """All ranks get the values of the rank that is the source. ``send`` is a collective that changes tensors."""
        before = {name: it.detach().clone() for name, it in buffers.items()}
        after = before if is_source else {name: it.clone() for name, it in before.items()}
        send(list(after.values()))
        if not is_source:
            self._buffers = {
                name: (own, after[name])
                for name, own in before.items()
                # To look at what is on a GPU would wait for it.
                if own.device.type != "cpu" or not _same_bits(own, after[name])
            }

    def drop(self) -> None:
        """Forgets them."""
        self._buffers = {}

    def take(self, buffers: dict[str, Any]) -> None:
        """Changes the buffers that are as they were then. Others have been set on purpose."""
        received, self._buffers = self._buffers, {}
        for name, (own, theirs) in received.items():
            current = buffers.get(name)
            if current is not None and _same_bits(current, own.to(current)):
                # Without a word to autograd, whose graphs may hold the buffer.
                with torch.no_grad(), torch.inference_mode(current.is_inference()):
                    current.data.copy_(theirs)


def _same_bits(one: Any, other: Any) -> bool:
    if one.shape != other.shape:
        return False
    return torch.equal(*(it.detach().reshape(-1).view(torch.uint8) for it in (one, other)))
