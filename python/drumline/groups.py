"""Process groups and their calls on arrays, without torch.

>>> import numpy as np
>>> from drumline import ProcessGroup
>>> group = ProcessGroup.alone()
>>> data = np.array([1.0, 2.0])
>>> group.all_reduce(data)
>>> data
array([1., 2.])
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any

import numpy as np

from drumline import _core, _exit
from drumline._arrays import Memory, Staging, staging_for
from drumline._objects import Objects
from drumline._registered import Shape, zeros

Seconds = float | timedelta


def seconds(limit: Seconds | None) -> float | None:
    """A time limit in seconds."""
    return limit.total_seconds() if isinstance(limit, timedelta) else limit


class Work:
    """A call in the background. It owns its arrays until its end."""

    def __init__(self, handle: _core.Work, staging: Staging) -> None:
        self._handle, self._staging = handle, staging

    def wait(self, timeout: Seconds | None = None) -> bool:
        """Waits for the end, at most ``timeout``. Returns whether the call has ended.

        Raises the errors of the blocking call: CollectiveError names the rank at fault.
        """
        ended = self._handle.wait(seconds(timeout))
        if ended:
            self._staging.finish()
        return ended

    def is_completed(self) -> bool:
        """Whether the call has ended, with or without an error."""
        return self._handle.is_completed()

    def exception(self) -> BaseException | None:
        """The error, if the call has failed."""
        return self._handle.error()

    def source_rank(self) -> int | None:
        """The sender, after a receive from any rank."""
        return self._handle.source()


class ProcessGroup(Objects):
    """Ranks that work together. All of them make the same calls in the same order.

    Calls work in place on numpy arrays, torch tensors and objects with ``__dlpack__`` or the buffer
    protocol. They return when this rank's part is done. With ``async_op=True`` they return a `Work`
    at once. ``op`` is one of sum, avg, min, max, product, band, bor, bxor, or ``("premul_sum",
    factor)``. Ranks are numbers in this group.

    A call that fails raises `CollectiveError`, which names the rank at fault. The failure poisons the
    group: every later call raises `PoisonedError` with the same reason.
    """

    def __init__(self, group: _core.Group) -> None:
        self._group = group
        _exit.watch(group)

    @staticmethod
    def alone() -> ProcessGroup:
        """A group of one, for programs that also run without a launcher."""
        return ProcessGroup(_core.Group.alone())

    @property
    def name(self) -> str:
        """``world`` for the whole job."""
        return self._group.name

    @property
    def rank(self) -> int:
        """The number of this rank in the group: 0 to ``world_size - 1``."""
        return self._group.rank

    @property
    def world_size(self) -> int:
        """The number of ranks in the group."""
        return self._group.world_size

    @property
    def ranks(self) -> list[int]:
        """The members' numbers in the whole job."""
        return self._group.ranks

    @property
    def timeout(self) -> float:
        """The time limit of calls, in seconds."""
        return self._group.timeout

    @property
    def is_destroyed(self) -> bool:
        """Whether `destroy` was called."""
        return self._group.is_destroyed

    def set_timeout(self, timeout: Seconds) -> None:
        """Sets the time limit of later calls."""
        self._group.set_timeout(float(seconds(timeout) or 0.0))

    def communication_time(self) -> float:
        """Seconds that calls have taken on this rank, including waiting."""
        return self._group.communication_time()

    def new_group(
        self,
        ranks: Sequence[int],
        *,
        name: str | None = None,
        timeout: Seconds | None = None,
        keep_order: bool = False,
    ) -> ProcessGroup:
        """Makes a group of some of the ranks. Only its members call this.

        Raises ValueError on any other rank.
        """
        limit = seconds(timeout)
        return ProcessGroup(self._group.new_group(list(ranks), name, limit, keep_order))

    def abort(self) -> None:
        """Aborts the group on all ranks. May be called from any thread."""
        self._group.abort()

    def destroy(self) -> None:
        """Closes the group after all ranks have called this."""
        self._group.destroy()

    def __enter__(self) -> ProcessGroup:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.destroy()

    def __repr__(self) -> str:
        return repr(self._group)

    def alloc_registered(self, shape: Shape, dtype: Any = np.float32) -> Any:
        """Zeros in memory that the ranks of a host share: a numpy array, or a torch tensor if ``dtype`` is
        torch's.

        Collectives of this group on this memory, or on a contiguous part of it, work directly in the memory
        of all ranks, in one pass. So either all ranks pass such memory to a call, or none does. Otherwise
        it is ordinary memory, and may outlive the group.

        Raises DrumlineError when the memory is used up; the setting ``registered_bytes_max`` is the limit.
        """
        return zeros(self._group, shape, dtype)

    def all_reduce(self, data: Any, op: Op = "sum", async_op: bool = False) -> Work | None:
        """Reduces the ``data`` of all ranks, in place, to the same bits everywhere."""
        staging, (name, factor) = staging_for(data), _operator(op)
        handle = self._group.all_reduce(staging.write(data), name, factor, async_op)
        return _ended(handle, staging)

    def reduce(self, data: Any, dst: int, op: Op = "sum", async_op: bool = False) -> Work | None:
        """Reduces the ``data`` of all ranks into that of rank ``dst``. Others keep their ``data``."""
        staging, (name, factor) = staging_for(data), _operator(op)
        memory = staging.write(data) if self.rank == dst else staging.read(data)
        return _ended(self._group.reduce(memory, name, factor, _rank(dst), async_op), staging)

    def scan(
        self, data: Any, op: Op = "sum", exclusive: bool = False, async_op: bool = False
    ) -> Work | None:
        """Reduces the ``data`` of the ranks up to this one (``exclusive``: below it), in place."""
        staging, (name, factor) = staging_for(data), _operator(op)
        handle = self._group.scan(staging.write(data), name, factor, exclusive, async_op)
        return _ended(handle, staging)

    def broadcast(self, data: Any, src: int, async_op: bool = False) -> Work | None:
        """Gives every rank the ``data`` of rank ``src``, in place."""
        staging = staging_for(data)
        return _ended(self._group.broadcast(staging.write(data), _rank(src), async_op), staging)

    def all_gather(self, outputs: Any, data: Any, async_op: bool = False) -> Work | None:
        """Gathers the ``data`` of all ranks.

        ``outputs`` is a list with an array for every rank, of any lengths, or one array that holds
        the data of all ranks in order.
        """
        staging = staging_for(data)
        filled = _each(outputs, staging.write)
        return _ended(self._group.all_gather(staging.read(data), filled, async_op), staging)

    def gather(
        self,
        data: Any,
        outputs: Any = None,
        dst: int = 0,
        counts: Sequence[int] | None = None,
        async_op: bool = False,
    ) -> Work | None:
        """Gathers the ``data`` of all ranks on rank ``dst``; elsewhere ``outputs`` is None.

        If ranks bring different numbers of elements, every rank passes the ``counts`` of all ranks.
        """
        staging = staging_for(data)
        filled = _each(outputs, staging.write)
        lengths = None if counts is None else list(counts)
        handle = self._group.gather(staging.read(data), filled, _rank(dst), lengths, async_op)
        return _ended(handle, staging)

    def scatter(
        self,
        output: Any,
        inputs: Any = None,
        src: int = 0,
        counts: Sequence[int] | None = None,
        async_op: bool = False,
    ) -> Work | None:
        """Gives rank ``i`` entry ``i`` of the ``inputs`` of rank ``src``; elsewhere they are None."""
        staging = staging_for(output)
        read = _each(inputs, staging.read)
        lengths = None if counts is None else list(counts)
        handle = self._group.scatter(read, staging.write(output), _rank(src), lengths, async_op)
        return _ended(handle, staging)

    def reduce_scatter(
        self, output: Any, inputs: Any, op: Op = "sum", async_op: bool = False
    ) -> Work | None:
        """Reduces the ``inputs`` of all ranks and gives rank ``i`` entry ``i`` of the result.

        ``inputs`` is a list with an array for every rank, or one array of equal blocks.
        """
        staging, (name, factor) = staging_for(output), _operator(op)
        read = _each(inputs, staging.read)
        handle = self._group.reduce_scatter(read, staging.write(output), name, factor, async_op)
        return _ended(handle, staging)

    def all_to_all(
        self, outputs: Sequence[Any], inputs: Sequence[Any], async_op: bool = False
    ) -> Work | None:
        """Sends ``inputs[i]`` to rank ``i`` and gets ``outputs[i]`` from it, of any lengths."""
        staging = staging_for(inputs[0] if len(inputs) else None)
        read, filled = _each(list(inputs), staging.read), _each(list(outputs), staging.write)
        send, receive = [it[1] for it in read], [it[1] for it in filled]
        return _ended(self._group.all_to_all(read, send, filled, receive, async_op), staging)

    def barrier(self, async_op: bool = False) -> Work | None:
        """Returns when every rank has called it."""
        return _ended(self._group.barrier(async_op), staging_for(None))

    def monitored_barrier(self, timeout: Seconds) -> None:
        """A barrier whose error names, on every rank, all ranks that have not come in time."""
        self._group.monitored_barrier(float(seconds(timeout) or 0.0))

    def send(self, data: Any, dst: int, tag: int = 0) -> None:
        """Sends ``data``; returns when the receiver has asked for it and this rank has sent it."""
        self.isend(data, dst, tag).wait()

    def isend(self, data: Any, dst: int, tag: int = 0) -> Work:
        """`send` in the background."""
        staging = staging_for(data)
        return Work(self._group.send(staging.read(data), _rank(dst), tag), staging)

    def recv(self, data: Any, src: int | None = None, tag: int = 0) -> int:
        """Receives into ``data``, from any rank without ``src``. Returns the sender."""
        work = self.irecv(data, src, tag)
        work.wait()
        source = work.source_rank() if src is None else src
        return -1 if source is None else source

    def irecv(self, data: Any, src: int | None = None, tag: int = 0) -> Work:
        """`recv` in the background."""
        staging = staging_for(data)
        source = None if src is None else _rank(src)
        return Work(self._group.recv(staging.write(data), source, tag), staging)


Op = str | tuple[str, Any]


def _operator(op: Op) -> tuple[str, Any]:
    if isinstance(op, str):
        return op, None
    if not (isinstance(op, tuple) and len(op) == 2):
        raise ValueError(f'an operator is a name or ("premul_sum", factor), and this is {op!r:.80}')
    return op


def _rank(number: int) -> int:
    """Checks a rank; the core takes only numbers from 0 on."""
    if number < 0:
        raise ValueError(f"a rank is at least 0, and this is {number}")
    return number


def _each(arrays: Any, take: Any) -> list[Memory]:
    if arrays is None:
        return []
    return [take(array) for array in (arrays if isinstance(arrays, list | tuple) else [arrays])]


def _ended(handle: _core.Work | None, staging: Staging) -> Work | None:
    if handle is not None:
        return Work(handle, staging)
    staging.finish()
    return None
