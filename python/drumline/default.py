"""The group of the whole job, and the methods of a group as functions.

``group=None`` means the group of the whole job. `ProcessGroup` documents each function. Ranks are numbers
in the group.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from drumline import _core, _exit
from drumline._non_member import GroupMember
from drumline._operators import Op
from drumline._registered import Shape, zeros
from drumline._world import group_or_world, is_initialized, is_set, set_world
from drumline.groups import ProcessGroup, Seconds, Work, seconds
from drumline.stores import Store, core_of


def init_process_group(
    backend: str | None = None,
    init_method: str | None = None,
    timeout: Seconds | None = None,
    world_size: int | None = -1,
    rank: int | None = -1,
    store: Store | object | None = None,
    group_name: str = "",
    pg_options: object = None,
    **settings: Any,
) -> ProcessGroup:
    """Connects all processes of the job, and returns the group ``world``.

    ``backend`` is ``drumline``, or ``mpi`` if an MPI library is there, or what `Backend.register_backend` has
    added.

    ``init_method`` is ``env://`` (what `drumline run` and torchrun set; the default), or
    ``tcp://host:port?rank=R&world_size=W``, or ``file:///path?rank=R&world_size=W``, or ``mpi://`` for
    ranks that ``mpirun`` has started, whose backend is then ``mpi``. The backend ``mpi`` without an
    ``init_method`` means ``mpi://``, unless ``RANK`` or ``MASTER_ADDR`` is set. It may also stand in the place of
    ``backend``. ``rank`` and ``world_size`` may be arguments instead. With a ``store``
    (drumline's or torch's) they must be, and there is no ``init_method``. ``group_name`` and
    ``pg_options`` are ignored. ``settings`` are those of the table in docs/reference/settings.md, such as
    ``shared_memory=False``.

    Raises ValueError for a setting that is missing or wrong. Raises StoreError or ConnectError if
    processes do not come; the text names them.
    """
    if is_initialized():
        raise ValueError(
            "the group of the whole job is there already: destroy_process_group() first"
        )
    if backend is not None and "://" in backend:
        if init_method is not None:
            raise ValueError(f"there are two init_methods, {backend!r} and {init_method!r}")
        backend, init_method = None, backend
    if backend is not None:
        settings["backend"] = str(backend)
    if timeout is not None:
        settings["timeout"] = seconds(timeout)
    rank, world_size = _given(rank), _given(world_size)
    if store is None:
        url = _with_place(init_method or "env://", rank, world_size)
        group = _core.Group.init(url, settings)
    elif init_method is not None:
        raise ValueError("with a store there is no init_method")
    elif rank is None or world_size is None:
        raise ValueError("with a store, pass rank and world_size")
    else:
        group = _core.Group.init_with_store(core_of(store), rank, world_size, settings)
    world = ProcessGroup(group)
    set_world(world)
    return world


def _given(number: int | None) -> int | None:
    """torch has -1 for what is not given."""
    return None if number == -1 else number


def _with_place(url: str, rank: int | None, world_size: int | None) -> str:
    parts = {"rank": rank, "world_size": world_size}
    query = "&".join(f"{name}={value}" for name, value in parts.items() if value is not None)
    return f"{url}{'&' if '?' in url else '?'}{query}" if query else url


def destroy_process_group(group: ProcessGroup | None = None) -> None:
    """Closes a group after all its ranks have called this."""
    group_or_world(group).destroy()


def new_group(
    ranks: Sequence[int] | None = None,
    timeout: Seconds | None = None,
    backend: str | None = None,
    pg_options: object = None,
    use_local_synchronization: bool = False,
    group_desc: str | None = None,
    *,
    name: str | None = None,
    keep_order: bool = False,
) -> ProcessGroup:
    """Connects some ranks of the job, or all. Other ranks may call it, as in torch, and need not: they get
    `GroupMember.NON_GROUP_MEMBER`, whose calls do nothing.

    ``backend`` is that of the whole job, and no other. ``name`` tells two groups of the same ranks apart.
    ``keep_order`` numbers the members as ``ranks`` does. The other arguments are ignored.
    """
    world = group_or_world(None)
    if backend is not None and backend.lower() != world.backend:
        raise ValueError(
            f"new_group: the backend of a group is that of the whole job, {world.backend!r}, and not "
            f"{backend!r}"
        )
    if ranks is not None and world.rank not in ranks and _are_ranks(ranks, world):
        return GroupMember.NON_GROUP_MEMBER
    return world.new_group(ranks, name=name, timeout=timeout, keep_order=keep_order)


def _are_ranks(ranks: Sequence[int], world: ProcessGroup) -> bool:
    return len({*ranks}) == len(ranks) and all(0 <= rank < world.world_size for rank in ranks)


def get_backend(group: ProcessGroup | None = None) -> str:
    """What carries the calls of the group."""
    return group_or_world(group).backend


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
    tensor: Any, op: Op = "sum", group: ProcessGroup | None = None, async_op: bool = False
) -> Work | None:
    """`ProcessGroup.all_reduce`."""
    return group_or_world(group).all_reduce(tensor, op, async_op)


def reduce(
    tensor: Any, dst: int, op: Op = "sum", group: ProcessGroup | None = None, async_op: bool = False
) -> Work | None:
    """`ProcessGroup.reduce`."""
    return group_or_world(group).reduce(tensor, dst, op, async_op)


def scan(
    tensor: Any,
    op: Op = "sum",
    exclusive: bool = False,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """`ProcessGroup.scan`."""
    return group_or_world(group).scan(tensor, op, exclusive, async_op)


def broadcast(
    tensor: Any, src: int, group: ProcessGroup | None = None, async_op: bool = False
) -> Work | None:
    """`ProcessGroup.broadcast`."""
    return group_or_world(group).broadcast(tensor, src, async_op)


def all_gather(
    tensor_list: Any, tensor: Any, group: ProcessGroup | None = None, async_op: bool = False
) -> Work | None:
    """`ProcessGroup.all_gather`."""
    return group_or_world(group).all_gather(tensor_list, tensor, async_op)


def gather(
    tensor: Any,
    gather_list: Any = None,
    dst: int = 0,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    *,
    counts: Sequence[int] | None = None,
) -> Work | None:
    """`ProcessGroup.gather`."""
    return group_or_world(group).gather(tensor, gather_list, dst, counts, async_op)


def scatter(
    tensor: Any,
    scatter_list: Any = None,
    src: int = 0,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    *,
    counts: Sequence[int] | None = None,
) -> Work | None:
    """`ProcessGroup.scatter`."""
    return group_or_world(group).scatter(tensor, scatter_list, src, counts, async_op)


def reduce_scatter(
    output: Any,
    input_list: Any,
    op: Op = "sum",
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """`ProcessGroup.reduce_scatter`."""
    return group_or_world(group).reduce_scatter(output, input_list, op, async_op)


def all_to_all(
    output_tensor_list: Sequence[Any],
    input_tensor_list: Sequence[Any],
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """`ProcessGroup.all_to_all`."""
    return group_or_world(group).all_to_all(output_tensor_list, input_tensor_list, async_op)


def barrier(
    group: ProcessGroup | None = None, async_op: bool = False, device_ids: object = None
) -> Work | None:
    """`ProcessGroup.barrier`. ``device_ids`` are ignored."""
    return group_or_world(group).barrier(async_op)


def monitored_barrier(
    group: ProcessGroup | None = None,
    timeout: Seconds | None = None,
    wait_all_ranks: bool = False,
) -> None:
    """`ProcessGroup.monitored_barrier`."""
    group_or_world(group).monitored_barrier(timeout, wait_all_ranks)


def send(tensor: Any, dst: int, group: ProcessGroup | None = None, tag: int = 0) -> None:
    """`ProcessGroup.send`."""
    group_or_world(group).send(tensor, dst, tag)


def isend(tensor: Any, dst: int, group: ProcessGroup | None = None, tag: int = 0) -> Work:
    """`ProcessGroup.isend`."""
    return group_or_world(group).isend(tensor, dst, tag)


def recv(
    tensor: Any, src: int | None = None, group: ProcessGroup | None = None, tag: int = 0
) -> int:
    """`ProcessGroup.recv`."""
    return group_or_world(group).recv(tensor, src, tag)


def irecv(
    tensor: Any, src: int | None = None, group: ProcessGroup | None = None, tag: int = 0
) -> Work:
    """`ProcessGroup.irecv`."""
    return group_or_world(group).irecv(tensor, src, tag)


class P2POp:
    """A message of `batch_isend_irecv`: ``op`` is `isend` or `irecv`, and ``peer`` the other rank."""

    def __init__(
        self,
        op: Callable[..., Work],
        tensor: Any,
        peer: int,
        group: ProcessGroup | None = None,
        tag: int = 0,
    ) -> None:
        if op not in (isend, irecv):
            raise ValueError(f"a P2POp is drumline.isend or drumline.irecv, and this is {op!r:.80}")
        self.op, self.tensor, self.peer, self.group, self.tag = op, tensor, peer, group, tag


def batch_isend_irecv(p2p_op_list: Sequence[P2POp]) -> list[Work]:
    """Begins all these messages, in any order of sends and receives. Returns a `Work` for each."""
    messages = list(p2p_op_list)
    wrong = next((it for it in messages if not isinstance(it, P2POp)), None)
    if wrong is not None or not messages:
        raise ValueError(f"batch_isend_irecv takes a list of P2POp, and this has {wrong!r:.80}")
    return [it.op(it.tensor, it.peer, it.group, it.tag) for it in messages]


def all_reduce_multigpu(
    tensor_list: Sequence[Any],
    op: Op = "sum",
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """`ProcessGroup.all_reduce_multigpu`."""
    return group_or_world(group).all_reduce_multigpu(tensor_list, op, async_op)


def reduce_multigpu(
    tensor_list: Sequence[Any],
    dst: int,
    op: Op = "sum",
    group: ProcessGroup | None = None,
    async_op: bool = False,
    dst_tensor: int = 0,
) -> Work | None:
    """`ProcessGroup.reduce_multigpu`."""
    return group_or_world(group).reduce_multigpu(tensor_list, dst, op, async_op, dst_tensor)


def broadcast_multigpu(
    tensor_list: Sequence[Any],
    src: int,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    src_tensor: int = 0,
) -> Work | None:
    """`ProcessGroup.broadcast_multigpu`."""
    return group_or_world(group).broadcast_multigpu(tensor_list, src, async_op, src_tensor)


def all_gather_multigpu(
    output_tensor_lists: Sequence[Sequence[Any]],
    input_tensor_list: Sequence[Any],
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """`ProcessGroup.all_gather_multigpu`."""
    world = group_or_world(group)
    return world.all_gather_multigpu(output_tensor_lists, input_tensor_list, async_op)


def reduce_scatter_multigpu(
    output_tensor_list: Sequence[Any],
    input_tensor_lists: Sequence[Sequence[Any]],
    op: Op = "sum",
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """`ProcessGroup.reduce_scatter_multigpu`."""
    world = group_or_world(group)
    return world.reduce_scatter_multigpu(output_tensor_list, input_tensor_lists, op, async_op)


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
