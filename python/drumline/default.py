"""The group of the whole job, and the methods of a group as functions.

``group=None`` means the group of the whole job. `ProcessGroup` documents each function. Ranks are numbers
in the group.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from drumline import _core, _exit
from drumline._registered import Shape, zeros
from drumline._world import group_or_world, is_initialized, is_set, set_world
from drumline.groups import Op, ProcessGroup, Seconds, Work, seconds
from drumline.stores import Store, core_of


def init_process_group(
    init_method: str = "env://",
    *,
    timeout: Seconds | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    store: Store | object | None = None,
    **settings: Any,
) -> ProcessGroup:
    """Connects all processes of the job, and returns the group ``world``.

    ``init_method`` is ``env://`` (what `drumline run` and torchrun set), or
    ``tcp://host:port?rank=R&world_size=W``, or ``file:///path?rank=R&world_size=W``; ``rank`` and
    ``world_size`` may be arguments instead. With a ``store`` (drumline's or torch's) they must be.
    ``settings`` are those of the table in docs/reference/settings.md, such as ``shared_memory=False``.

    Raises ValueError for a setting that is missing or wrong. Raises StoreError or ConnectError if
    processes do not come; the text names them.
    """
    if is_initialized():
        raise ValueError(
            "the group of the whole job is there already: destroy_process_group() first"
        )
    if timeout is not None:
        settings["timeout"] = seconds(timeout)
    if store is None:
        url = _with_place(init_method, rank, world_size)
        group = _core.Group.init(url, settings)
    elif rank is None or world_size is None:
        raise ValueError("with a store, pass rank and world_size")
    else:
        group = _core.Group.init_with_store(core_of(store), rank, world_size, settings)
    world = ProcessGroup(group)
    set_world(world)
    return world


def _with_place(url: str, rank: int | None, world_size: int | None) -> str:
    parts = {"rank": rank, "world_size": world_size}
    query = "&".join(f"{name}={value}" for name, value in parts.items() if value is not None)
    return f"{url}{'&' if '?' in url else '?'}{query}" if query else url


def destroy_process_group(group: ProcessGroup | None = None) -> None:
    """Closes a group after all its ranks have called this."""
    group_or_world(group).destroy()


def new_group(
    ranks: Sequence[int],
    *,
    name: str | None = None,
    timeout: Seconds | None = None,
    keep_order: bool = False,
) -> ProcessGroup:
    """Connects some ranks of the job. Only they call this."""
    return group_or_world(None).new_group(ranks, name=name, timeout=timeout, keep_order=keep_order)


def get_rank(group: ProcessGroup | None = None) -> int:
    """The number of this rank in the group."""
    return group_or_world(group).rank


def get_world_size(group: ProcessGroup | None = None) -> int:
    """The number of ranks in the group."""
    return group_or_world(group).world_size


def metrics_text() -> str:
    """What calls have taken, in the text format of Prometheus: hand it out where your program is scraped.

    ``drumline_calls_total``, ``drumline_bytes_total`` and ``drumline_seconds_total`` by group, rank and
    operation, and ``drumline_group_failed``, of every group of this process that is not destroyed: also of
    torch's groups on the backend ``drumline``, and of those behind DistributedDataParallel.
    """
    groups = [it for it in _exit.watched() if isinstance(it, _core.Group)]
    return _core.Group.metrics_text(groups)


def alloc_registered(shape: Shape, dtype: Any = np.float32, group: Any = None) -> Any:
    """`ProcessGroup.alloc_registered`, for a group of drumline's or one of torch's on drumline.

    Without ``group``: for the group of `init_process_group`, or else for torch's default group.
    """
    is_ours = isinstance(group, ProcessGroup)
    if group is None:
        is_ours = is_set() or "torch" not in sys.modules
    if is_ours:
        return group_or_world(group).alloc_registered(shape, dtype)
    from drumline.ddp.groups import group_of, own_group

    core = own_group(group_of(group))
    if core is None:
        raise ValueError(
            "this group of torch's is not on the backend drumline, which has the memory "
            "(TORCH_DISTRIBUTED_DEBUG=DETAIL hides the backend, too)"
        )
    return zeros(core, shape, dtype)


def all_reduce(
    data: Any, op: Op = "sum", group: ProcessGroup | None = None, async_op: bool = False
) -> Work | None:
    """`ProcessGroup.all_reduce`."""
    return group_or_world(group).all_reduce(data, op, async_op)


def reduce(
    data: Any, dst: int, op: Op = "sum", group: ProcessGroup | None = None, async_op: bool = False
) -> Work | None:
    """`ProcessGroup.reduce`."""
    return group_or_world(group).reduce(data, dst, op, async_op)


def scan(
    data: Any,
    op: Op = "sum",
    exclusive: bool = False,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """`ProcessGroup.scan`."""
    return group_or_world(group).scan(data, op, exclusive, async_op)


def broadcast(
    data: Any, src: int, group: ProcessGroup | None = None, async_op: bool = False
) -> Work | None:
    """`ProcessGroup.broadcast`."""
    return group_or_world(group).broadcast(data, src, async_op)


def all_gather(
    outputs: Any, data: Any, group: ProcessGroup | None = None, async_op: bool = False
) -> Work | None:
    """`ProcessGroup.all_gather`."""
    return group_or_world(group).all_gather(outputs, data, async_op)


def gather(
    data: Any,
    outputs: Any = None,
    dst: int = 0,
    counts: Sequence[int] | None = None,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """`ProcessGroup.gather`."""
    return group_or_world(group).gather(data, outputs, dst, counts, async_op)


def scatter(
    output: Any,
    inputs: Any = None,
    src: int = 0,
    counts: Sequence[int] | None = None,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """`ProcessGroup.scatter`."""
    return group_or_world(group).scatter(output, inputs, src, counts, async_op)


def reduce_scatter(
    output: Any,
    inputs: Any,
    op: Op = "sum",
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """`ProcessGroup.reduce_scatter`."""
    return group_or_world(group).reduce_scatter(output, inputs, op, async_op)


def all_to_all(
    outputs: Sequence[Any],
    inputs: Sequence[Any],
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """`ProcessGroup.all_to_all`."""
    return group_or_world(group).all_to_all(outputs, inputs, async_op)


def barrier(group: ProcessGroup | None = None, async_op: bool = False) -> Work | None:
    """`ProcessGroup.barrier`."""
    return group_or_world(group).barrier(async_op)


def monitored_barrier(timeout: Seconds, group: ProcessGroup | None = None) -> None:
    """`ProcessGroup.monitored_barrier`."""
    group_or_world(group).monitored_barrier(timeout)


def send(data: Any, dst: int, tag: int = 0, group: ProcessGroup | None = None) -> None:
    """`ProcessGroup.send`."""
    group_or_world(group).send(data, dst, tag)


def isend(data: Any, dst: int, tag: int = 0, group: ProcessGroup | None = None) -> Work:
    """`ProcessGroup.isend`."""
    return group_or_world(group).isend(data, dst, tag)


def recv(
    data: Any, src: int | None = None, tag: int = 0, group: ProcessGroup | None = None
) -> int:
    """`ProcessGroup.recv`."""
    return group_or_world(group).recv(data, src, tag)


def irecv(
    data: Any, src: int | None = None, tag: int = 0, group: ProcessGroup | None = None
) -> Work:
    """`ProcessGroup.irecv`."""
    return group_or_world(group).irecv(data, src, tag)


def all_gather_object(
    object_list: list[Any] | None,
    obj: Any,
    group: ProcessGroup | None = None,
    *,
    allow_pickle: bool = False,
) -> list[Any]:
    """`ProcessGroup.all_gather_object`."""
    return group_or_world(group).all_gather_object(object_list, obj, allow_pickle=allow_pickle)


def gather_object(
    obj: Any,
    object_gather_list: list[Any] | None = None,
    dst: int = 0,
    group: ProcessGroup | None = None,
    *,
    allow_pickle: bool = False,
) -> list[Any] | None:
    """`ProcessGroup.gather_object`."""
    return group_or_world(group).gather_object(obj, object_gather_list, dst, allow_pickle=allow_pickle)


def broadcast_object_list(
    object_list: list[Any],
    src: int = 0,
    group: ProcessGroup | None = None,
    *,
    allow_pickle: bool = False,
) -> list[Any]:
    """`ProcessGroup.broadcast_object_list`."""
    return group_or_world(group).broadcast_object_list(object_list, src, allow_pickle=allow_pickle)


def scatter_object_list(
    scatter_object_output_list: list[Any] | None,
    scatter_object_input_list: list[Any] | None = None,
    src: int = 0,
    group: ProcessGroup | None = None,
    *,
    allow_pickle: bool = False,
) -> Any:
    """`ProcessGroup.scatter_object_list`."""
    return group_or_world(group).scatter_object_list(
        scatter_object_output_list, scatter_object_input_list, src, allow_pickle=allow_pickle
    )
