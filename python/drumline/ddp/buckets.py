"""Gradients in memory that the ranks of a host share, averaged in place while backward runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

import torch

from drumline import _core, _exit
from drumline._registered import storage_of
from drumline.ddp.autograd import Averaged
from drumline.torch import on_device
from drumline.torch.tensors import CODE

_MARKS = "(which parameters were used)"


class Places:
    """Where gradients are averaged: a tensor for each parameter, which nobody else has.

    A gradient has memory of its own, whatever the program has made of it, and is copied to its place and back. With
    ``view``, a function that makes a tensor on the memory of a place, it lies there and nothing is copied, as long
    as the program leaves it there.
    """

    def __init__(
        self,
        names: Sequence[str],
        parameters: Sequence[Any],
        tensors: list[Any],
        view: Callable[[int], Any] | None,
    ) -> None:
        self._names, self._parameters, self._view = names, parameters, view
        self.tensors = tensors

    def begin(self) -> None:
        """Before the first gradient of a step: one that the program has put into another's place moves out."""
        if self._view is None:
            return
        memory = {tensor.data_ptr() for tensor in self.tensors} | set(map(_memory, self.tensors))
        for parameter, place in zip(self._parameters, self.tensors, strict=True):
            gradient = parameter.grad
            if gradient is None or gradient.layout is not torch.strided or _is_at(gradient, place):
                continue
            if _memory(gradient) in memory:
                parameter.grad = gradient.clone()

    def lift(self, index: int) -> None:
        """The gradient stays as it is, whatever happens to its place."""
        gradient = self._parameters[index].grad
        if gradient is not None and _is_at(gradient, self.tensors[index]):
            self._parameters[index].grad = gradient.clone()

    def to_copy(self, index: int) -> Any:
        """The gradient that is to be copied to its place. None: it is there, or it was none, and now are zeros."""
        gradient, place = self._parameters[index].grad, self.tensors[index]
        if gradient is None:
            place.zero_()
            return None
        if gradient.layout is not torch.strided:
            raise TypeError(
                f"parameter {self._names[index]} got a sparse gradient, which cannot be averaged in place: use "
                "torch's DistributedDataParallel on the backend drumline, or sparse=False"
            )
        if gradient.shape != place.shape:
            raise RuntimeError(
                f"parameter {self._names[index]} has another shape than when the model was wrapped: "
                f"{list(gradient.shape)}, and not {list(place.shape)}. Wrap the module anew"
            )
        return None if _is_at(gradient, place) else gradient.detach()

    def put(self, index: int) -> None:
        """Copies a gradient, or zeros without one, to its place, unless it is there already."""
        gradient = self.to_copy(index)
        if gradient is not None:
            self.tensors[index].copy_(gradient)

    def take(self, indices: Iterable[int]) -> list[Any]:
        """Makes averages the gradients of their parameters. Returns these gradients."""
        to, source, taken = [], [], []
        for index in indices:
            parameter, place = self._parameters[index], self.tensors[index]
            gradient = parameter.grad
            if gradient is not None and gradient.requires_grad:
                # Made with create_graph: its derivatives are wanted.
                parameter.grad = Averaged.of(gradient, place)
            elif self._view is not None and _fits(gradient, parameter, place):
                if gradient is None or not _is_at(gradient, place):
                    parameter.grad = self._view(index)
            else:
                if gradient is None or gradient.is_inference() or 0 in gradient.stride():
                    parameter.grad = torch.empty_like(parameter, requires_grad=False)
                to.append(parameter.grad)
                source.append(place)
            taken.append(parameter.grad)
        copy(to, source)
        return taken


def _is_at(gradient: Any, place: Any) -> bool:
    """Whether a gradient is what lies at a place. Programs may have given it other memory, or another shape."""
    return (
        gradient.layout is torch.strided
        and gradient.data_ptr() == place.data_ptr()
        and (place.data_ptr() != 0 or _memory(gradient) == _memory(place))
        and gradient.dtype == place.dtype
        and gradient.device == place.device
        and gradient.shape == place.shape
        and gradient.stride() == place.stride()
        and not gradient.is_conj()
        and not gradient.is_neg()
    )


def _memory(tensor: Any) -> int:
    """Which storage a tensor lies in. Storages without memory, as on the device meta, differ, too."""
    storage = tensor.untyped_storage()
    address: int = storage.data_ptr() or storage._cdata
    return address


def _fits(gradient: Any, parameter: Any, place: Any) -> bool:
    """Whether what lies at a place can be the gradient. Programs may have given it, or the parameter, another type."""
    like = parameter if gradient is None else gradient
    return (like.dtype, like.device, like.shape) == (place.dtype, place.device, place.shape)


def copy(to: list[Any], source: list[Any]) -> None:
    """Copies tensors, those between places on one GPU together and in the caller's stream."""
    pairs: dict[Any, tuple[list[Any], list[Any]]] = {}
    with torch.no_grad():
        for one, other in zip(to, source, strict=True):
            if one.is_conj() or one.is_neg():  # which torch cannot copy to together with others
                one.copy_(other)
                continue
            is_there = one.device == other.device and one.device.type == on_device.GPUS.kind
            some = pairs.setdefault(one.device if is_there else None, ([], []))
            some[0].append(one)
            some[1].append(other)
        for device, (some_to, some_source) in pairs.items():
            if device is None:
                torch._foreach_copy_(some_to, some_source)
            else:
                on_device.GPUS.copy(some_to, some_source)


class SharedBuckets:
    """A place for every gradient, in an `AsyncReduce` of the core. Gradients travel as another type (``wire``) where
    that is shorter.

    With ``marks``, ranks also learn which parameters any rank has used. ``views``: gradients on the CPU lie in their
    places.
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
        views: bool = False,
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
        self.places = Places(
            names,
            parameters,
            [
                tensor_at(memory, self._engine.offset(name), dtype, parameter)
                for name, parameter, dtype in zip(names, parameters, types, strict=True)
            ],
            self._view if views else None,
        )
        self._marks = None
        if marks:
            like = torch.empty(len(parameters))
            self._marks = tensor_at(memory, self._engine.offset(_MARKS), torch.float32, like)

    def _view(self, index: int) -> Any:
        """What the program gets. It has a storage of its own, because a program may save it, or move it elsewhere."""
        place = self.places.tensors[index]
        if place.numel() == 0:
            return torch.empty_like(place)
        storage = storage_of(self._engine, self._engine.offset(self._names[index]), place.nbytes)
        return tensor_at(storage, 0, place.dtype, place)

    def bring(self, index: int) -> None:
        """Copies a gradient, or zeros without one, to its place and hands it to the core."""
        self.places.put(index)
        self._engine.async_reduce(self._names[index])

    def bring_zeros(self, index: int) -> None:
        """Takes part without a gradient."""
        self.places.tensors[index].zero_()
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
    if code is None or not (dtype.is_floating_point or dtype.is_complex):
        raise TypeError(f"parameter {name} has type {dtype}, which drumline cannot average")
    return code


def tensor_at(storage: Any, offset: int, dtype: Any, like: Any) -> Any:
    """A tensor at a byte offset of a storage, with the strides of a dense parameter."""
    strides = torch.empty_like(like, device="meta", memory_format=torch.preserve_format).stride()
    with torch.no_grad():
        empty = torch.empty(0, dtype=dtype, device=storage.device)
        return empty.set_(storage, offset // empty.element_size(), like.shape, strides)
