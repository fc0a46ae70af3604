"""The group of the whole job, and the methods of a group as functions, with the meaning that torch gives them.

``group=None`` means the group of the whole job. `ProcessGroup` documents each function. ``src``, ``dst`` and ``peer``
are ranks by their numbers in the whole job, whatever the group. ``group_src``, ``group_dst`` and ``group_peer``, which
may be given in their place, are numbers in the group.
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
from drumline._world import group_or_world, is_initialized, set_world
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
    device_id: object = None,
    sort_ranks: bool = True,
    *,
    name: str | None = None,
) -> ProcessGroup:
    """Connects some ranks of the job, or all. Other ranks may call it, as in torch, and need not: they get
    `GroupMember.NON_GROUP_MEMBER`, whose calls do nothing.

    ``backend`` is that of the whole job, and no other. ``sort_ranks=False`` numbers the members as ``ranks`` does.
    ``name`` tells two groups of the same ranks apart. The other arguments are ignored.
    """
    world = group_or_world(None)
    _check_backend("new_group", backend, world)
    members = None if ranks is None else _members("new_group", ranks, world)
    if members is not None and world.rank not in members:
        return GroupMember.NON_GROUP_MEMBER
    return world.new_group(members, name=name, timeout=timeout, keep_order=not sort_ranks)


def split_group(
    parent_pg: ProcessGroup | None = None,
    split_ranks: Sequence[Sequence[int]] | None = None,
    timeout: Seconds | None = None,
    pg_options: object = None,
    group_desc: str | None = None,
    backend: str | None = None,
) -> ProcessGroup:
    """Divides a group: connects the ranks of that list in ``split_ranks`` in which this rank is, numbered as the list
    does.

    Unlike in `new_group`, these are numbers in ``parent_pg``. A rank in no list gets
    `GroupMember.NON_GROUP_MEMBER`. ``pg_options`` and ``group_desc`` are ignored.
    """
    parent = group_or_world(parent_pg)
    own = parent.group_rank(group_or_world(None).rank)
    _check_backend("split_group", backend, parent)
    if not split_ranks or not all(len(ranks) for ranks in split_ranks):
        raise ValueError("split_group: split_ranks has at least one list, and each list at least one rank")
    parts = [_members("split_group", ranks, parent) for ranks in split_ranks]
    if len({rank for part in parts for rank in part}) < sum(map(len, parts)):
        raise ValueError(f"split_group: a rank is in two lists of {parts!r:.200}")
    for part in parts:
        if own in part:
            return parent.new_group(part, timeout=timeout, keep_order=True)
    return GroupMember.NON_GROUP_MEMBER


def _check_backend(call: str, backend: str | None, group: ProcessGroup) -> None:
    if backend is not None and backend.lower() != group.backend:
        raise ValueError(
            f"{call}: the backend of a group is that of the whole job, {group.backend!r}, and not {backend!r}"
        )


def _members(call: str, ranks: Sequence[int], group: ProcessGroup) -> list[int]:
    """The ranks as numbers of ``group``, each of them once."""
    numbers = [group._checked(rank) for rank in ranks]
    if len({*numbers}) < len(numbers):
        raise ValueError(f"{call}: a rank is listed twice in {numbers!r:.200}")
    return numbers


def get_backend(group: ProcessGroup | None = None) -> str:
    """What carries the calls of the group."""
    return group_or_world(group).backend


def get_rank(group: ProcessGroup | None = None) -> int:
    """The number of this rank in the group."""
    return group_or_world(group).rank


def get_world_size(group: ProcessGroup | None = None) -> int:
    """The number of ranks in the group."""
    return group_or_world(group).world_size


def get_group_rank(group: ProcessGroup | None, global_rank: int) -> int:
    """`ProcessGroup.group_rank`."""
    return group_or_world(group).group_rank(global_rank)


def get_global_rank(group: ProcessGroup | None, group_rank: int) -> int:
    """`ProcessGroup.global_rank`."""
    return group_or_world(group).global_rank(group_rank)


def get_process_group_ranks(group: ProcessGroup | None = None) -> list[int]:
    """The members' numbers in the whole job, in the order of their numbers in the group."""
    return group_or_world(group).ranks


def _one(group: ProcessGroup | None, **given: int | None) -> tuple[ProcessGroup, int]:
    """The group, and the number in it of a rank that is given as ``src=`` or as ``group_src=``."""
    group = group_or_world(group)
    (name, rank), (group_name, group_rank) = given.items()
    if group is GroupMember.NON_GROUP_MEMBER:
        return group, -1
    if group_rank is not None:
        if rank is not None:
            raise ValueError(f"Can't specify both {name} and {group_name}")
        return group, group._checked(group_rank)
    if rank is None:
        raise ValueError(f"Must specify {name} or {group_name}")
    try:
        return group, group.group_rank(rank)
    except ValueError as error:
        raise ValueError(
            f"{error}: {name} is a number in the whole job, and {group_name} one in the group"
        ) from None


def _default(rank: int | None, group_rank: int | None) -> int | None:
    """torch's root where none is given: rank 0 of the whole job, whatever the group."""
    return 0 if rank is None and group_rank is None else rank


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
        torch = sys.modules.get("torch")
        is_torchs = torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized()
        is_ours = is_initialized() or not is_torchs
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
    tensor: Any,
    dst: int | None = None,
    op: Op = "sum",
    group: ProcessGroup | None = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Work | None:
    """`ProcessGroup.reduce`."""
    group, root = _one(group, dst=dst, group_dst=group_dst)
    return group.reduce(tensor, root, op, async_op)


def broadcast(
    tensor: Any,
    src: int | None = None,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> Work | None:
    """`ProcessGroup.broadcast`."""
    group, root = _one(group, src=src, group_src=group_src)
    return group.broadcast(tensor, root, async_op)


def all_gather(
    tensor_list: Any, tensor: Any, group: ProcessGroup | None = None, async_op: bool = False
) -> Work | None:
    """`ProcessGroup.all_gather`."""
    return group_or_world(group).all_gather(tensor_list, tensor, async_op)


def all_gather_into_tensor(
    output_tensor: Any, input_tensor: Any, group: ProcessGroup | None = None, async_op: bool = False
) -> Work | None:
    """`ProcessGroup.all_gather` into one array."""
    return group_or_world(group).all_gather(output_tensor, input_tensor, async_op)


def gather(
    tensor: Any,
    gather_list: Any = None,
    dst: int | None = None,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    group_dst: int | None = None,
    *,
    counts: Sequence[int] | None = None,
) -> Work | None:
    """`ProcessGroup.gather`."""
    group, root = _one(group, dst=_default(dst, group_dst), group_dst=group_dst)
    return group.gather(tensor, gather_list, root, counts, async_op)


def scatter(
    tensor: Any,
    scatter_list: Any = None,
    src: int | None = None,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    group_src: int | None = None,
    *,
    counts: Sequence[int] | None = None,
) -> Work | None:
    """`ProcessGroup.scatter`."""
    group, root = _one(group, src=_default(src, group_src), group_src=group_src)
    return group.scatter(tensor, scatter_list, root, counts, async_op)


def reduce_scatter(
    output: Any,
    input_list: Any,
    op: Op = "sum",
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """`ProcessGroup.reduce_scatter`."""
    return group_or_world(group).reduce_scatter(output, input_list, op, async_op)


def reduce_scatter_tensor(
    output: Any,
    input: Any,
    op: Op = "sum",
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """`ProcessGroup.reduce_scatter` of one array."""
    return group_or_world(group).reduce_scatter(output, input, op, async_op)


def all_to_all(
    output_tensor_list: Sequence[Any],
    input_tensor_list: Sequence[Any],
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """`ProcessGroup.all_to_all`."""
    return group_or_world(group).all_to_all(output_tensor_list, input_tensor_list, async_op)


def all_to_all_single(
    output: Any,
    input: Any,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """`ProcessGroup.all_to_all_single`."""
    sizes = output_split_sizes, input_split_sizes
    return group_or_world(group).all_to_all_single(output, input, *sizes, async_op)


def barrier(
    group: ProcessGroup | None = None,
    async_op: bool = False,
    device_ids: object = None,
    timeout: Seconds | None = None,
) -> Work | None:
    """`ProcessGroup.barrier`. ``device_ids`` are ignored."""
    return group_or_world(group).barrier(async_op, timeout)


def monitored_barrier(
    group: ProcessGroup | None = None,
    timeout: Seconds | None = None,
    wait_all_ranks: bool = False,
) -> None:
    """`ProcessGroup.monitored_barrier`."""
    group_or_world(group).monitored_barrier(timeout, wait_all_ranks)


def send(
    tensor: Any,
    dst: int | None = None,
    group: ProcessGroup | None = None,
    tag: int = 0,
    group_dst: int | None = None,
) -> None:
    """`ProcessGroup.send`."""
    group, to = _one(group, dst=dst, group_dst=group_dst)
    group.send(tensor, to, tag)


def isend(
    tensor: Any,
    dst: int | None = None,
    group: ProcessGroup | None = None,
    tag: int = 0,
    group_dst: int | None = None,
) -> Work:
    """`ProcessGroup.isend`."""
    group, to = _one(group, dst=dst, group_dst=group_dst)
    return group.isend(tensor, to, tag)


def recv(
    tensor: Any,
    src: int | None = None,
    group: ProcessGroup | None = None,
    tag: int = 0,
    group_src: int | None = None,
) -> int:
    """`ProcessGroup.recv`. Returns the sender by its number in the whole job; -1 on a rank outside of the group."""
    group, source = _one_or_any(group, src, group_src)
    sender = group.recv(tensor, source, tag)
    return -1 if group is GroupMember.NON_GROUP_MEMBER else group.global_rank(sender)


def irecv(
    tensor: Any,
    src: int | None = None,
    group: ProcessGroup | None = None,
    tag: int = 0,
    group_src: int | None = None,
) -> Work:
    """`ProcessGroup.irecv`."""
    group, source = _one_or_any(group, src, group_src)
    return group.irecv(tensor, source, tag)


def _one_or_any(
    group: ProcessGroup | None, src: int | None, group_src: int | None
) -> tuple[ProcessGroup, int | None]:
    if src is None and group_src is None:
        return group_or_world(group), None
    return _one(group, src=src, group_src=group_src)


class P2POp:
    """A message of `batch_isend_irecv`: ``op`` is `isend` or `irecv`, and ``peer`` the other rank."""

    def __init__(
        self,
        op: Callable[..., Work],
        tensor: Any,
        peer: int | None = None,
        group: ProcessGroup | None = None,
        tag: int = 0,
        group_peer: int | None = None,
    ) -> None:
        if op not in (isend, irecv):
            raise ValueError(f"a P2POp is drumline.isend or drumline.irecv, and this is {op!r:.80}")
        self.op, self.tensor, self.tag = op, tensor, tag
        self.group, self.group_peer = _one(group, peer=peer, group_peer=group_peer)
        is_member = self.group is not GroupMember.NON_GROUP_MEMBER
        self.peer = self.group.global_rank(self.group_peer) if is_member else peer


def batch_isend_irecv(p2p_op_list: Sequence[P2POp]) -> list[Work]:
    """Begins all these messages, in any order of sends and receives. Returns a `Work` for each."""
    messages = list(p2p_op_list)
    wrong = next((it for it in messages if not isinstance(it, P2POp)), None)
    if wrong is not None or not messages:
        raise ValueError(f"batch_isend_irecv takes a list of P2POp, and this has {wrong!r:.80}")
    works = []
    for it in messages:
        peer = {"group_dst" if it.op is isend else "group_src": it.group_peer}
        works.append(it.op(it.tensor, group=it.group, tag=it.tag, **peer))
    return [work for work in works if work is not None]


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
    dst: int | None = None,
    op: Op = "sum",
    group: ProcessGroup | None = None,
    async_op: bool = False,
    dst_tensor: int = 0,
    group_dst: int | None = None,
) -> Work | None:
    """`ProcessGroup.reduce_multigpu`."""
    group, root = _one(group, dst=dst, group_dst=group_dst)
    return group.reduce_multigpu(tensor_list, root, op, async_op, dst_tensor)


def broadcast_multigpu(
    tensor_list: Sequence[Any],
    src: int | None = None,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    src_tensor: int = 0,
    group_src: int | None = None,
) -> Work | None:
    """`ProcessGroup.broadcast_multigpu`."""
    group, root = _one(group, src=src, group_src=group_src)
    return group.broadcast_multigpu(tensor_list, root, async_op, src_tensor)


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
    dst: int | None = None,
    group: ProcessGroup | None = None,
    group_dst: int | None = None,
    *,
    allow_pickle: bool = False,
) -> list[Any] | None:
    """`ProcessGroup.gather_object`."""
    group, root = _one(group, dst=_default(dst, group_dst), group_dst=group_dst)
    return group.gather_object(obj, object_gather_list, root, allow_pickle=allow_pickle)


def broadcast_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: ProcessGroup | None = None,
    device: object = None,
    group_src: int | None = None,
    *,
    allow_pickle: bool = False,
) -> list[Any]:
    """`ProcessGroup.broadcast_object_list`. ``device`` is ignored."""
    group, root = _one(group, src=_default(src, group_src), group_src=group_src)
    return group.broadcast_object_list(object_list, root, allow_pickle=allow_pickle)


def scatter_object_list(
    scatter_object_output_list: list[Any] | None,
    scatter_object_input_list: list[Any] | None = None,
    src: int | None = None,
    group: ProcessGroup | None = None,
    group_src: int | None = None,
    *,
    allow_pickle: bool = False,
) -> Any:
    """`ProcessGroup.scatter_object_list`."""
    group, root = _one(group, src=_default(src, group_src), group_src=group_src)
    return group.scatter_object_list(
        scatter_object_output_list, scatter_object_input_list, root, allow_pickle=allow_pickle
    )


def send_object_list(
    object_list: list[Any],
    dst: int | None = None,
    group: ProcessGroup | None = None,
    device: object = None,
    group_dst: int | None = None,
    *,
    allow_pickle: bool = False,
) -> None:
    """Sends the objects of a list by `ProcessGroup.send_object`. ``device`` is ignored."""
    group, to = _one(group, dst=dst, group_dst=group_dst)
    group.send_object(list(object_list), to, allow_pickle=allow_pickle)


def recv_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: ProcessGroup | None = None,
    device: object = None,
    group_src: int | None = None,
    *,
    allow_pickle: bool = False,
) -> int:
    """Replaces the objects of a list by those of a `send_object_list`. Returns the sender, as `recv` does."""
    group, source = _one(group, src=src, group_src=group_src)
    objects = group.recv_object(source, allow_pickle=allow_pickle)
    if group is GroupMember.NON_GROUP_MEMBER:
        return -1
    if not isinstance(objects, list) or len(objects) != len(object_list):
        what = f"{len(objects)} objects" if isinstance(objects, list) else "an object that is no list"
        raise ValueError(
            f"recv_object_list: {group._who(source)} sends {what}, and the list has {len(object_list)} entries"
        )
    object_list[:] = objects
    return group.global_rank(source)
