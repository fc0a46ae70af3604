"""Collectives on arrays in the memory of GPUs: CuPy's, numba's, torch's.

    import cupy, drumline
    from drumline.device import DeviceGroup

    group = drumline.init_process_group()
    on = DeviceGroup(group)                      # on all ranks
    gradient = cupy.ones(1000, cupy.float32)
    work = on.all_reduce(gradient, "avg")        # queued, behind what the stream does
    work.join()                                  # what the stream does next sees the average

An array is an object with ``__cuda_array_interface__``, or a torch tensor on a GPU. Its elements must lie side by
side. The driver is found at run time. No GPU has run this.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

import numpy as np

from drumline import _core
from drumline._operators import Op, operator
from drumline.groups import ProcessGroup, Seconds, seconds

Memory = tuple[int, int, int, Any]

_CODES = dict(_core.DTYPES)
_BY_NUMPY = {
    "u1": "u8", "i1": "i8", "u2": "u16", "i2": "i16", "u4": "u32", "i4": "i32", "u8": "u64",
    "i8": "i64", "f2": "f16", "f4": "f32", "f8": "f64", "b1": "bool", "c8": "complex64",
    "c16": "complex128",
}  # fmt: skip


class DeviceWork:
    """A call that is queued. It keeps its arrays until its end, also if nobody keeps this object."""

    def __init__(self, handle: _core.DeviceWork, stream: int) -> None:
        self._handle, self._stream = handle, stream

    def join(self, stream: Any = None) -> None:
        """Has what a stream does from now on wait for the end: the stream of the call unless given. The host does
        not wait."""
        self._handle.join(self._stream if stream is None else _number(stream))

    def wait(self, timeout: Seconds | None = None) -> bool:
        """Waits on the host for the end, at most ``timeout``. Returns whether it has come. Raises why the call has
        failed."""
        return self._handle.wait(seconds(timeout))

    def is_completed(self) -> bool:
        """Whether the end has come, with or without an error."""
        return self._handle.is_completed()

    def exception(self) -> BaseException | None:
        """The error, if the call has failed."""
        return self._handle.error()


class DeviceGroup:
    """The ranks of a group, each with a GPU. All ranks make it together, and make the same calls in the same order.

    ``device`` is the driver's number of the GPU; unless given, the one that is current on this thread, or else 0.
    Several ranks may share one. ``library`` is the driver's file (``DRUMLINE_CUDA_LIBRARY``). To calls, a rank is its
    number in the group.

    ``way`` is ``"host"``: through memory of the host, with the bits of `ProcessGroup`; ``"nccl"``: by NCCL
    (``DRUMLINE_NCCL_LIBRARY``), in whose own order sums are added; or ``"auto"``: by NCCL where all ranks can and it was
    faster when the group was made. `why` says what was found.

    A call takes ``stream``: a number, or an object with ``ptr`` (CuPy) or ``cuda_stream`` (torch). Unless given, it is
    torch's current stream for a tensor, and else the stream that the array names, or the default stream.
    """

    def __init__(
        self,
        group: ProcessGroup,
        device: int | None = None,
        *,
        library: str | None = None,
        window_bytes: int | None = None,
        way: str = "auto",
    ) -> None:
        self._core = _core.DeviceGroup(group._group, device, library, window_bytes, way)

    @property
    def device(self) -> str:
        """What the GPU is: ``cuda:0 (NAME, ADDRESS)``."""
        return self._core.device

    @property
    def why(self) -> str:
        """Why calls go by NCCL, or through the host."""
        return self._core.why

    def explain(self, dtype: Any = "f32") -> str:
        """Which way an all-reduce of this type takes, and why."""
        return self._core.explain(_CODES[dtype] if dtype in _CODES else _code(np.dtype(dtype).str))

    def all_reduce(self, array: Any, op: Op = "sum", stream: Any = None) -> DeviceWork:
        """Replaces the elements by their sum over all ranks. Through the host: the bits of `ProcessGroup.all_reduce`."""
        at = _stream(array, stream)
        return DeviceWork(self._core.all_reduce(at, memory(array), *operator(op)), at)

    def all_reduce_coalesced(
        self, arrays: Sequence[Any], op: Op = "sum", stream: Any = None
    ) -> DeviceWork:
        """`all_reduce` of several arrays of one type in one call. They are not copied on the GPU."""
        if not arrays:
            raise ValueError("all_reduce_coalesced takes at least one array")
        at = _stream(arrays[0], stream)
        call = self._core.all_reduce_coalesced(at, [memory(it) for it in arrays], *operator(op))
        return DeviceWork(call, at)

    def reduce(self, array: Any, root: int, op: Op = "sum", stream: Any = None) -> DeviceWork:
        """`all_reduce` for rank ``root``; other ranks' elements stay as they are."""
        at = _stream(array, stream)
        return DeviceWork(self._core.reduce(at, memory(array), *operator(op), root), at)

    def broadcast(self, array: Any, root: int, stream: Any = None) -> DeviceWork:
        """Replaces the elements of all ranks by those of rank ``root``."""
        at = _stream(array, stream)
        return DeviceWork(self._core.broadcast(at, memory(array), root), at)

    def all_gather(self, output: Any, array: Any, stream: Any = None) -> DeviceWork:
        """Fills ``output`` with the arrays of all ranks, by rank."""
        at = _stream(array, stream)
        return DeviceWork(self._core.all_gather(at, memory(array), [memory(output)]), at)

    def reduce_scatter(
        self, output: Any, array: Any, op: Op = "sum", stream: Any = None
    ) -> DeviceWork:
        """Fills ``output`` with the block of the sum that has this rank's number."""
        at = _stream(array, stream)
        call = self._core.reduce_scatter(at, [memory(array)], memory(output), *operator(op))
        return DeviceWork(call, at)

    def gather(self, array: Any, output: Any, root: int, stream: Any = None) -> DeviceWork:
        """Fills rank ``root``'s ``output`` with the arrays of all ranks; it is None elsewhere."""
        at = _stream(array, stream)
        outputs = [] if output is None else [memory(output)]
        return DeviceWork(self._core.gather(at, memory(array), outputs, root), at)

    def scatter(self, output: Any, array: Any, root: int, stream: Any = None) -> DeviceWork:
        """Fills ``output`` with this rank's block of rank ``root``'s ``array``, which is None elsewhere."""
        at = _stream(output, stream)
        inputs = [] if array is None else [memory(array)]
        return DeviceWork(self._core.scatter(at, inputs, memory(output), root), at)

    def all_to_all(self, output: Any, array: Any, stream: Any = None) -> DeviceWork:
        """Sends block ``k`` of ``array`` to rank ``k``, and fills ``output`` with a block of each."""
        at = _stream(array, stream)
        return DeviceWork(self._core.all_to_all_single(at, memory(array), memory(output)), at)

    def barrier(self, stream: Any = None) -> DeviceWork:
        """Ends when the streams of all ranks have come to their barrier."""
        at = 0 if stream is None else _number(stream)
        return DeviceWork(self._core.barrier(at), at)

    def send(self, array: Any, to: int, tag: int = 0, stream: Any = None) -> DeviceWork:
        """Sends the elements to a rank."""
        at = _stream(array, stream)
        return DeviceWork(self._core.send(at, memory(array), to, tag), at)

    def recv(self, array: Any, source: int, tag: int = 0, stream: Any = None) -> DeviceWork:
        """Receives what rank ``source`` sends."""
        at = _stream(array, stream)
        return DeviceWork(self._core.recv(at, memory(array), source, tag), at)

    def abort(self) -> None:
        """Fails all calls of this group, here at once. Other ranks hear that this rank has aborted."""
        self._core.abort()

    def leave(self, patience: Seconds = 5.0) -> None:
        """Leaves the other ranks when all calls have ended, after waiting for them at most ``patience``."""
        self._core.leave(seconds(patience) or 0.0)

    def __enter__(self) -> DeviceGroup:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self.leave()
        else:
            self.abort()


class AsyncReduce:
    """Gradients by name, in any order, reduced to one buffer of the GPU while backward runs.

        reduce = AsyncReduce(group, {"weight": 1000, "bias": 10}, fused)    # on all ranks
        reduce.async_reduce("bias", bias)        # behind what the stream does; returns at once
        reduce.async_reduce("weight", weight)
        reduce.synchronize()                     # what the stream does next sees the averages in ``fused``

    ``tensors`` are names and numbers of elements, the same on all ranks. ``fused`` is an array of the GPU with room for
    all of them, side by side; its type is theirs. They lie in the order of rank 0's ``tensors``. ``op`` is any operator
    without a factor. ``device`` and ``library`` are those of `DeviceGroup`.
    """

    def __init__(
        self,
        group: ProcessGroup,
        tensors: Mapping[str, int],
        fused: Any,
        *,
        op: str = "avg",
        bucket_bytes: int | None = None,
        device: int | None = None,
        library: str | None = None,
        window_bytes: int | None = None,
    ) -> None:
        self._fused, buffer = fused, memory(fused)
        entries = [(name, count, buffer[2]) for name, count in tensors.items()]
        self._core = _core.DeviceAsyncReduce(
            group._group, entries, buffer, op, bucket_bytes, device, library, window_bytes
        )

    def place(self, name: str) -> slice:
        """Where the result of a tensor lies in ``fused``, in elements."""
        return slice(*self._core.place(name))

    def async_reduce(self, name: str, array: Any = None, stream: Any = None) -> None:
        """Brings a tensor: from ``array``, or from its place in ``fused``. Until the stream of `synchronize` comes there,
        it must not be written."""
        data = None if array is None else memory(array)
        self._core.async_reduce(self._stream(array, stream), name, data)

    def synchronize(self, stream: Any = None) -> None:
        """Has what the stream does next see all results. Waits until all ranks have brought all tensors, and for no
        GPU. If a rank has not brought one, all ranks raise NotBroughtError, which names it."""
        self._core.synchronize(self._stream(None, stream))

    def wait(self) -> None:
        """Waits on the host for the results of the last step. Raises why there are none."""
        self._core.wait()

    def counts(self) -> tuple[int, int, int]:
        """Steps without an error, rounds in which ranks told each other what is complete, and all-reduces."""
        return self._core.counts()

    def abort(self) -> None:
        """Aborts the step on all ranks."""
        self._core.abort()

    def stop(self) -> None:
        """Ends it when all ranks do."""
        self._core.stop()

    def _stream(self, array: Any, stream: Any) -> int:
        return _stream(self._fused if array is None else array, stream)


def memory(array: Any) -> Memory:
    """The elements of an array on a GPU: address, number, type, and the array, which keeps them."""
    if getattr(array, "is_cuda", False) and hasattr(array, "data_ptr"):
        from drumline.torch.tensors import CODE

        if not array.is_contiguous():
            raise ValueError("the elements of the tensor do not lie side by side: use contiguous()")
        if array.dtype not in CODE:
            raise TypeError(f"elements of type {array.dtype} cannot be reduced")
        return array.data_ptr(), array.numel(), CODE[array.dtype], array
    interface = getattr(array, "__cuda_array_interface__", None)
    if interface is None:
        raise TypeError(
            f"{type(array).__name__} is no array on a GPU: it has no __cuda_array_interface__"
        )
    code = _code(interface["typestr"])
    shape = interface["shape"]
    if not _is_dense(shape, interface.get("strides"), int(interface["typestr"][2:])):
        raise ValueError("the elements of the array do not lie side by side: copy it first")
    return interface["data"][0], math.prod(shape), code, array


def _code(typestr: str) -> int:
    name = _BY_NUMPY.get(typestr[1:])
    if name is None or typestr[0] not in "<|=":
        raise TypeError(f"elements of numpy's type {typestr} cannot be reduced")
    return _CODES[name]


def _is_dense(shape: tuple[int, ...], strides: tuple[int, ...] | None, width: int) -> bool:
    if strides is None or math.prod(shape) == 0:
        return True
    expected = width
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


def _stream(array: Any, stream: Any) -> int:
    if stream is not None:
        return _number(stream)
    if getattr(array, "is_cuda", False) and hasattr(array, "data_ptr"):
        import torch

        return int(torch.cuda.current_stream(array.device).cuda_stream)
    interface = getattr(array, "__cuda_array_interface__", None) or {}
    return int(interface.get("stream") or 0)


def _number(stream: Any) -> int:
    for name in ("cuda_stream", "ptr"):
        if hasattr(stream, name):
            return int(getattr(stream, name))
    return int(stream)
