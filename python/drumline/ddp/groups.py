"""The group of the core that serves a process group of any kind."""

from __future__ import annotations

import hashlib
import sys
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from drumline import _core, _exit, _world
from drumline.groups import ProcessGroup
from drumline.torch.store import master_of
from drumline.torch.tensors import CODE

_connected: weakref.WeakKeyDictionary[Any, _core.Group] = weakref.WeakKeyDictionary()


def group_of(process_group: Any, device_mesh: Any = None) -> Any:
    """The process group to use, torch's or drumline's: ``process_group``, the group of a mesh of one
    dimension, or the group of the whole job."""
    if device_mesh is not None:
        if process_group is not None:
            raise RuntimeError("Cannot specify both process_group and device_mesh arguments.")
        if device_mesh.ndim != 1:
            raise RuntimeError(
                f"Only 1D device mesh is supported, but got {device_mesh}: take one dimension of it, as "
                f"device_mesh[{(device_mesh.mesh_dim_names or ('its name',))[0]!r}]"
            )
        return device_mesh.get_group(mesh_dim=0)
    if process_group is not None:
        if not hasattr(process_group, "rank"):
            raise TypeError(
                f"a process group is one of torch's or drumline's, and this is {process_group!r:.80}: take "
                "what init_process_group or new_group has made"
            )
        return process_group
    if dist.is_available() and dist.is_initialized():
        return dist.group.WORLD
    if _world.is_initialized():
        return _world.group_or_world(None)
    raise RuntimeError(
        "there is no process group: call torch.distributed.init_process_group or "
        "drumline.init_process_group first"
    )


def is_default(process_group: Any) -> bool:
    """Whether this is the group of the whole job."""
    try:
        return group_of(None) is process_group
    except RuntimeError:
        return False


def core_group(process_group: Any = None) -> _core.Group:
    """The group of the core behind ``process_group``. For a group of another backend, makes a second group
    of the same ranks, which meet in its store.

    Without ``process_group``: the group of the whole job, torch's or that of
    `drumline.init_process_group`. The first call for a group of another backend is a collective.
    """
    process_group = group_of(process_group)
    if isinstance(process_group, ProcessGroup):
        return process_group._group
    own = own_group(process_group)
    if own is not None:
        return own
    beside = _connected.get(process_group)
    if beside is None or beside.is_destroyed:
        beside = _connected[process_group] = _connect(process_group)
        _exit.watch(beside)
    return beside


def own_group(process_group: Any) -> _core.Group | None:
    """The group of the core behind a torch group on the backend drumline; None for other backends."""
    module = sys.modules.get("drumline.torch.operations")
    backend = _backend(process_group)
    if module is None or not isinstance(backend, module.Operations):
        return None
    group: _core.Group = backend._group
    return group


def _backend(process_group: Any) -> Any:
    try:
        return process_group._get_backend(torch.device("cpu"))
    except RuntimeError:  # it has none for the CPU
        return None


def _connect(process_group: Any) -> _core.Group:
    from torch.distributed.distributed_c10d import _get_process_group_store, default_pg_timeout

    store = _get_process_group_store(process_group)
    options = getattr(_backend(process_group), "options", None)
    timeout = getattr(options, "_timeout", default_pg_timeout)
    name = f"ddp/{getattr(process_group, 'group_name', 'world')}"
    ranks = dist.get_process_group_ranks(process_group)
    settings = {"timeout": timeout.total_seconds()}
    return _core.Group.connect(name, store, process_group.rank(), ranks, master_of(store), settings)


def gathered(group: _core.Group, own: Sequence[int]) -> list[list[int]]:
    """The numbers of all ranks, by rank. All of them give equally many. A collective."""
    mine = torch.tensor(own, dtype=torch.int64)
    rows = torch.empty(group.world_size, len(own), dtype=torch.int64)
    code = CODE[torch.int64]
    group.all_gather(
        (mine.data_ptr(), mine.numel(), code, mine), [(rows.data_ptr(), rows.numel(), code, rows)]
    )
    numbers: list[list[int]] = rows.tolist()
    return numbers


def number_of(value: object) -> int:
    """A number for what a value looks like, the same on all ranks, and not 0."""
    digest = hashlib.blake2b(repr(value).encode(), digest_size=7).digest()
    return int.from_bytes(digest, "little") or 1
