"""Gradients in memory that the ranks of a host share, averaged in place while backward runs."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch

from drumline import _core, _exit
from drumline._registered import storage_of
from drumline.torch.tensors import CODE

_MARKS = "(which parameters were used)"


class SharedBuckets:
    """A place for every gradient, in an `AsyncReduce` of the core.

    The gradient of a parameter on the CPU is a view of its place. It is copied only if autograd has put
    it elsewhere. Gradients on other devices, and gradients that travel as another type (``wire``), are
    copied to their place and back.

    With ``marks``, ranks also learn which parameters any rank has used.
    """

    averages = True

    def __init__(
        self,
        group: _core.Group,
        names: Sequence[str],
        parameters: Sequence[Any],
        bucket_bytes: int | None,
        marks: bool,
        wire: Any = None,
    ) -> None:
        self._names, self._parameters = names, parameters
        types = [wire_type(it.dtype, wire) for it in parameters]
        # Backward comes from the end, and neighbours share a bucket.
        tensors = [
            (name, parameter.numel(), _code(name, dtype))
            for name, parameter, dtype in zip(names, parameters, types, strict=True)
        ][::-1]
        if marks:
            tensors.append((_MARKS, len(parameters), CODE[torch.float32]))
        self._engine = _core.AsyncReduce(group, tensors, "avg", bucket_bytes)
        _exit.watch(self._engine)
        memory = storage_of(self._engine)
        self.places = [
            tensor_at(memory, self._engine.offset(name), dtype, parameter)
            for name, parameter, dtype in zip(names, parameters, types, strict=True)
        ]
        self._is_view = [
            parameter.device.type == "cpu" and parameter.dtype == place.dtype
            for parameter, place in zip(parameters, self.places, strict=True)
        ]
        self._marks = None
        if marks:
            like = torch.empty(len(parameters))
            self._marks = tensor_at(memory, self._engine.offset(_MARKS), torch.float32, like)

    def bring(self, index: int) -> None:
        """Copies a gradient, or zeros without one, to its place and hands it to the core."""
        name = self._names[index]
        put(name, self._parameters[index], self.places[index], self._is_view[index])
        self._engine.async_reduce(name)

    def bring_zeros(self, index: int) -> None:
        """Takes part without a gradient."""
        self.places[index].zero_()
        self._engine.async_reduce(self._names[index])

    def synchronize(self, used: Sequence[bool]) -> list[bool]:
        """Waits until all gradients are averaged. Which parameters were used, on any rank as far
        as there are marks."""
        if self._marks is None:
            self._engine.synchronize()
            return list(used)
        self._marks.copy_(torch.tensor(used, dtype=torch.float32))
        self._engine.async_reduce(_MARKS)
        self._engine.synchronize()
        return [mark > 0 for mark in self._marks.tolist()]

    def take(self, index: int) -> None:
        """Makes the average the gradient of its parameter."""
        parameter, place = self._parameters[index], self.places[index]
        if self._is_view[index]:
            if parameter.grad is not place:
                parameter.grad = place
        elif parameter.grad is None:
            parameter.grad = place.to(parameter.device, parameter.dtype, copy=True)
        else:
            with torch.no_grad():
                parameter.grad.copy_(place)

    def abort(self) -> None:
        """Breaks the reduction off, on all ranks."""
        self._engine.abort()

    def leave(self, patience_s: float) -> None:
        """Leaves the other ranks. Gradients stay in place."""
        self._engine.leave(patience_s)

    def drop(self) -> None:
        """Leaves without waiting. An earlier failure has been raised before."""
        with suppress(_core.DrumlineError):
            self._engine.drop()


def wire_type(dtype: Any, wire: Any) -> Any:
    """The type in which gradients travel: ``wire`` only where it is shorter."""
    return wire if wire is not None and dtype in (torch.float32, torch.float64) else dtype


def _code(name: str, dtype: Any) -> int:
    code = CODE.get(dtype)
    if code is None or not dtype.is_floating_point:
        raise TypeError(f"parameter {name} has type {dtype}, which drumline cannot average")
    return code


def put(name: str, parameter: Any, place: Any, is_view: bool) -> None:
    """Copies a gradient, or zeros without one, to its place, unless it is there already."""
    gradient = parameter.grad
    if gradient is place:
        return
    with torch.no_grad():
        if gradient is None:
            place.zero_()
            return
        if gradient.layout is not torch.strided:
            raise TypeError(
                f"parameter {name} got a sparse gradient, which cannot be averaged in place: use "
                "torch's DistributedDataParallel on the backend drumline, or sparse=False"
            )
        place.copy_(gradient)
        if is_view:
            parameter.grad = place


def tensor_at(storage: Any, offset: int, dtype: Any, like: Any) -> Any:
    """A tensor at a byte offset of a storage, with the strides of a dense parameter."""
    strides = torch.empty_like(like, device="meta", memory_format=torch.preserve_format).stride()
    with torch.no_grad():
        empty = torch.empty(0, dtype=dtype, device=storage.device)
        return empty.set_(storage, offset // empty.element_size(), like.shape, strides)
