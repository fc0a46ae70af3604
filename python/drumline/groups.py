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

import threading
from collections.abc import Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any

import numpy as np

from drumline import _core, _exit
from drumline._arrays import Memory, Staging, staging_for
from drumline._futures import Future
from drumline._objects import Objects
from drumline._operators import Op, operator
from drumline._profile import profiled
from drumline._registered import Shape, zeros

Seconds = float | timedelta


def seconds(limit: Seconds | None) -> float | None:
    """A time limit in seconds."""
    return limit.total_seconds() if isinstance(limit, timedelta) else limit


class Work:
    """A call in the background. It owns its arrays until its end."""

    def __init__(self, handle: _core.Work, staging: Staging, result: Any = ()) -> None:
        self._handle, self._staging, self._result = handle, staging, result
        self._future: Future | None = None
        self._lock = threading.RLock()  # a handler of a signal may interrupt its thread

    def wait(self, timeout: Seconds | None = None) -> bool:
        """Waits for the end, at most ``timeout``. Returns whether the call has ended.

        Raises the errors of the blocking call: CollectiveError names the rank at fault.
        """
        ended = self._handle.wait(seconds(timeout))
        if ended:
            self._finish()
        return ended

    def get_future(self) -> Future:
        """The end as a future. Its value is a list of the arrays that the call has written."""
        with self._lock:
            if self._future is None:
                self._future = Future()
                begins = self._future
            else:
                return self._future
        self._handle.then(lambda error: self._end(begins, error))
        return begins

    def _end(self, future: Future, error: BaseException | None) -> None:
        if error is None:
            try:
                self._finish()
            except Exception as raised:
                error = raised
        if error is None:
            future.set_result(list(self._result))
        else:
            future.set_exception(error)

    def _finish(self) -> None:
        with self._lock:
            self._staging.finish()

    def is_completed(self) -> bool:
        """Whether the call has ended, with or without an error."""
        return self._handle.is_completed()

    def exception(self) -> BaseException | None:
        """The error, if the call has failed."""
        return self._handle.error()

    def source_rank(self) -> int | None:
        """The sender, after a receive from any rank: its number in the group."""
        return self._handle.source()


class ProcessGroup(Objects):
    """Ranks that work together. All of them make the same calls in the same order.

    Calls work in place on numpy arrays, torch tensors and objects with ``__dlpack__`` or the buffer
    protocol. They return when this rank's part is done. With ``async_op=True`` they return a `Work`
    at once. ``op`` is a `ReduceOp` (drumline's or torch's), its name, or ``("premul_sum", factor)``.

    To the methods, and in what they return, a rank is its number in this group, as in torch's own
    ``ProcessGroup``; so the parameters have torch's names for that, ``group_src`` and ``group_dst``. The functions
    of `drumline` with the same names take numbers in the whole job as ``src`` and ``dst``.

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

    @property
    def backend(self) -> str:
        """What carries its calls: ``drumline``, or what `register_backend` has added."""
        return self._group.backend

    def new_group(
        self,
        ranks: Sequence[int] | None = None,
        *,
        name: str | None = None,
        timeout: Seconds | None = None,
        keep_order: bool = False,
    ) -> ProcessGroup:
        """Makes a group of some of the ranks of this one, or of all. Only its members call this.

        Raises ValueError on any other rank.
        """
        members = [self._checked(it) for it in (range(self.world_size) if ranks is None else ranks)]
        return ProcessGroup(self._group.new_group(members, name, seconds(timeout), keep_order))

    def abort(self) -> None:
        """Aborts the group on all ranks. May be called from any thread."""
        self._group.abort()

    def destroy(self) -> None:
        """Closes the group after all ranks have called this. A handler of a signal waits for them half a second."""
        if _exit.in_handler():
            self._group.leave(_exit.HANDLER_PATIENCE_S)
        else:
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

    @profiled("all_reduce")
    def all_reduce(self, tensor: Any, op: Op = "sum", async_op: bool = False) -> Work | None:
        """Reduces the ``tensor`` of all ranks, in place, to the same bits everywhere."""
        staging, (name, factor) = staging_for(tensor), operator(op)
        handle = self._group.all_reduce(staging.write(tensor), name, factor, async_op)
        return _ended(handle, staging, [tensor])

    @profiled("reduce")
    def reduce(
        self, tensor: Any, group_dst: int, op: Op = "sum", async_op: bool = False
    ) -> Work | None:
        """Reduces the ``tensor`` of all ranks into that of rank ``group_dst``. Others keep their ``tensor``."""
        staging, (name, factor), root = staging_for(tensor), operator(op), self._checked(group_dst)
        memory = staging.write(tensor) if self.rank == root else staging.read(tensor)
        handle = self._group.reduce(memory, name, factor, root, async_op)
        return _ended(handle, staging, [tensor])

    @profiled("broadcast")
    def broadcast(self, tensor: Any, group_src: int, async_op: bool = False) -> Work | None:
        """Gives every rank the ``tensor`` of rank ``group_src``, in place."""
        staging, root = staging_for(tensor), self._checked(group_src)
        handle = self._group.broadcast(staging.write(tensor), root, async_op)
        return _ended(handle, staging, [tensor])

    @profiled("all_gather")
    def all_gather(self, tensor_list: Any, tensor: Any, async_op: bool = False) -> Work | None:
        """Gathers the ``tensor`` of all ranks.

        ``tensor_list`` is a list with an array for every rank, of any lengths, or one array that
        holds the data of all ranks in order.
        """
        staging = staging_for(tensor)
        filled = _each(tensor_list, staging.write)
        handle = self._group.all_gather(staging.read(tensor), filled, async_op)
        return _ended(handle, staging, _list(tensor_list))

    @profiled("gather")
    def gather(
        self,
        tensor: Any,
        gather_list: Any = None,
        group_dst: int = 0,
        counts: Sequence[int] | None = None,
        async_op: bool = False,
    ) -> Work | None:
        """Gathers the ``tensor`` of all ranks on rank ``group_dst``; elsewhere ``gather_list`` is None.

        If ranks bring different numbers of elements, every rank passes the ``counts`` of all ranks.
        """
        staging = staging_for(tensor)
        filled = _each(gather_list, staging.write)
        lengths = None if counts is None else list(counts)
        handle = self._group.gather(staging.read(tensor), filled, self._checked(group_dst), lengths, async_op)
        return _ended(handle, staging, _list(gather_list))

    @profiled("scatter")
    def scatter(
        self,
        tensor: Any,
        scatter_list: Any = None,
        group_src: int = 0,
        counts: Sequence[int] | None = None,
        async_op: bool = False,
    ) -> Work | None:
        """Gives rank ``i`` entry ``i`` of the ``scatter_list`` of rank ``group_src``; elsewhere it is None."""
        staging = staging_for(tensor)
        read = _each(scatter_list, staging.read)
        lengths = None if counts is None else list(counts)
        root = self._checked(group_src)
        handle = self._group.scatter(read, staging.write(tensor), root, lengths, async_op)
        return _ended(handle, staging, [tensor])

    @profiled("reduce_scatter")
    def reduce_scatter(
        self, output: Any, input_list: Any, op: Op = "sum", async_op: bool = False
    ) -> Work | None:
        """Reduces the ``input_list`` of all ranks and gives rank ``i`` entry ``i`` of the result.

        ``input_list`` is a list with an array for every rank, or one array of equal blocks.
        """
        staging, (name, factor) = staging_for(output), operator(op)
        read = _each(input_list, staging.read)
        handle = self._group.reduce_scatter(read, staging.write(output), name, factor, async_op)
        return _ended(handle, staging, [output])

    @profiled("all_to_all")
    def all_to_all(
        self,
        output_tensor_list: Sequence[Any],
        input_tensor_list: Sequence[Any],
        async_op: bool = False,
    ) -> Work | None:
        """Sends entry ``i`` of the inputs to rank ``i`` and gets entry ``i`` of the outputs from it, of
        any lengths."""
        inputs, outputs = list(input_tensor_list), list(output_tensor_list)
        staging = staging_for(inputs[0] if inputs else None)
        read, filled = _each(inputs, staging.read), _each(outputs, staging.write)
        send, receive = [it[1] for it in read], [it[1] for it in filled]
        handle = self._group.all_to_all(read, send, filled, receive, async_op)
        return _ended(handle, staging, outputs)

    @profiled("all_to_all")
    def all_to_all_single(
        self,
        output: Any,
        input: Any,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        async_op: bool = False,
    ) -> Work | None:
        """Sends block ``i`` of ``input`` to rank ``i`` and gets block ``i`` of ``output`` from it.

        A block is ``split_sizes[i]`` rows, of the first dimension; unless given, all are equally long.
        """
        staging = staging_for(input)
        read, filled = staging.read(input), staging.write(output)
        send = self._block_lengths(input, read, input_split_sizes, "input")
        receive = self._block_lengths(output, filled, output_split_sizes, "output")
        handle = self._group.all_to_all([read], send, [filled], receive, async_op)
        return _ended(handle, staging, [output])

    def _block_lengths(
        self, array: Any, memory: Memory, sizes: Sequence[int] | None, which: str
    ) -> list[int]:
        """How many elements the block of each rank has."""
        count, ranks = memory[1], self.world_size
        rows = [*getattr(array, "shape", (count,)), 1][0]
        if not sizes:
            if rows % ranks:
                raise ValueError(
                    f"all_to_all_single: the {rows} rows of the {which} cannot be divided by {ranks} ranks"
                )
            return [count // ranks] * ranks
        if len(sizes) != ranks or sum(sizes) != rows or min(sizes) < 0:
            raise ValueError(
                f"all_to_all_single: {which}_split_sizes has a number of rows for each of the {ranks} ranks, "
                f"{rows} in all, and this is {list(sizes)!r:.80}"
            )
        return [int(size) * (count // max(rows, 1)) for size in sizes]

    @profiled("barrier")
    def barrier(self, async_op: bool = False, timeout: Seconds | None = None) -> Work | None:
        """Returns when every rank has called it. ``timeout`` is that of the group unless given."""
        limit = seconds(timeout)
        group = self._group if limit is None else self._group.within(limit)
        return _ended(group.barrier(async_op), staging_for(None), [])

    @profiled("monitored_barrier")
    def monitored_barrier(
        self, timeout: Seconds | None = None, wait_all_ranks: bool = False
    ) -> None:
        """A barrier whose error names, on every rank, all ranks that have not come in time.

        The time is that of the group unless given. All missing ranks are named, also without
        ``wait_all_ranks``.
        """
        limit = seconds(timeout)
        self._group.monitored_barrier(self.timeout if limit is None else limit)

    def send(self, tensor: Any, group_dst: int, tag: int = 0) -> None:
        """Sends ``tensor``; returns when the receiver has asked for it and this rank has sent it."""
        self.isend(tensor, group_dst, tag).wait()

    @profiled("send")
    def isend(self, tensor: Any, group_dst: int, tag: int = 0) -> Work:
        """`send` in the background."""
        staging, to = staging_for(tensor), self._checked(group_dst)
        return Work(self._group.send(staging.read(tensor), to, tag), staging, [tensor])

    def recv(self, tensor: Any, group_src: int | None = None, tag: int = 0) -> int:
        """Receives into ``tensor``, from any rank without ``group_src``. Returns the sender."""
        work = self.irecv(tensor, group_src, tag)
        work.wait()
        source = work.source_rank() if group_src is None else self._checked(group_src)
        return -1 if source is None else source

    @profiled("recv")
    def irecv(self, tensor: Any, group_src: int | None = None, tag: int = 0) -> Work:
        """`recv` in the background."""
        staging = staging_for(tensor)
        source = None if group_src is None else self._checked(group_src)
        return Work(self._group.recv(staging.write(tensor), source, tag), staging, [tensor])

    # Several arrays of a rank, each of which counts as a member of its own.

    @profiled("all_reduce")
    def all_reduce_multigpu(
        self, tensor_list: Sequence[Any], op: Op = "sum", async_op: bool = False
    ) -> Work | None:
        """`all_reduce` over all arrays of all ranks. Every one of them gets the result."""
        staging, name = _staging_for_list(tensor_list), _plain_operator(op)
        handle = self._group.all_reduce_multi(_each(tensor_list, staging.write), name, async_op)
        return _ended(handle, staging, list(tensor_list))

    @profiled("reduce")
    def reduce_multigpu(
        self,
        tensor_list: Sequence[Any],
        group_dst: int,
        op: Op = "sum",
        async_op: bool = False,
        dst_tensor: int = 0,
    ) -> Work | None:
        """The same, and only array ``dst_tensor`` of rank ``group_dst`` gets the result."""
        staging, name = _staging_for_list(tensor_list), _plain_operator(op)
        memories, root = _each(tensor_list, staging.write), self._checked(group_dst)
        handle = self._group.reduce_multi(memories, name, root, _place(dst_tensor), async_op)
        return _ended(handle, staging, list(tensor_list))

    @profiled("broadcast")
    def broadcast_multigpu(
        self, tensor_list: Sequence[Any], group_src: int, async_op: bool = False, src_tensor: int = 0
    ) -> Work | None:
        """Gives every array of every rank the values of array ``src_tensor`` of rank ``group_src``."""
        staging = _staging_for_list(tensor_list)
        memories, root = _each(tensor_list, staging.write), self._checked(group_src)
        handle = self._group.broadcast_multi(memories, root, _place(src_tensor), async_op)
        return _ended(handle, staging, list(tensor_list))

    @profiled("all_gather")
    def all_gather_multigpu(
        self,
        output_tensor_lists: Sequence[Sequence[Any]],
        input_tensor_list: Sequence[Any],
        async_op: bool = False,
    ) -> Work | None:
        """Gathers all arrays of all ranks into each list: array ``j`` of rank ``k``, which has ``n``, in
        place ``k * n + j``."""
        staging = _staging_for_list(input_tensor_list)
        filled = [_each(outputs, staging.write) for outputs in output_tensor_lists]
        read = _each(input_tensor_list, staging.read)
        handle = self._group.all_gather_multi(read, filled, async_op)
        return _ended(handle, staging, [it for outputs in output_tensor_lists for it in outputs])

    @profiled("reduce_scatter")
    def reduce_scatter_multigpu(
        self,
        output_tensor_list: Sequence[Any],
        input_tensor_lists: Sequence[Sequence[Any]],
        op: Op = "sum",
        async_op: bool = False,
    ) -> Work | None:
        """Reduces all lists of all ranks. Output ``j`` of rank ``k``, which has ``n``, gets entry ``k * n
        + j``."""
        staging, name = _staging_for_list(output_tensor_list), _plain_operator(op)
        read = [_each(inputs, staging.read) for inputs in input_tensor_lists]
        filled = _each(output_tensor_list, staging.write)
        handle = self._group.reduce_scatter_multi(read, filled, name, async_op)
        return _ended(handle, staging, list(output_tensor_list))


def _place(number: int) -> int:
    """Checks a place in a list; the core takes only numbers from 0 on."""
    if number < 0:
        raise ValueError(f"a place in a list is at least 0, and this is {number}")
    return number


def _plain_operator(op: Op) -> str:
    name, factor = operator(op)
    if factor is not None or name == "premul_sum":
        raise ValueError("the calls on lists of arrays have no premul_sum: multiply before the call")
    return name


def _staging_for_list(arrays: Sequence[Any]) -> Staging:
    return staging_for(arrays[0] if len(arrays) else None)


def _list(arrays: Any) -> list[Any]:
    if arrays is None:
        return []
    return list(arrays) if isinstance(arrays, list | tuple) else [arrays]


def _each(arrays: Any, take: Any) -> list[Memory]:
    return [take(array) for array in _list(arrays)]


def _ended(handle: _core.Work | None, staging: Staging, result: list[Any]) -> Work | None:
    if handle is not None:
        return Work(handle, staging, result)
    staging.finish()
    return None
