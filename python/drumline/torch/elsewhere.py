"""torch's own group for the devices that have another backend, where drumline is the process group itself."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroup

from drumline.torch.operations import Place
from drumline.torch.register import is_ours


def elsewhere(
    place: Place, backends: dict[str, str], backend_options: Any
) -> dict[str, ProcessGroup]:
    """The group, for each kind of device that it serves."""
    others = {kind: name for kind, name in backends.items() if not is_ours(name)}
    if not others:
        return {}
    types = {
        name: dist.Backend.backend_type_map.get(name, ProcessGroup.BackendType.CUSTOM)
        for name in others.values()
    }
    default = next(iter(types))
    make: Any = ProcessGroup
    holder: Any
    if hasattr(make, "Options"):  # before 2.6
        holder = make(place.store, place.rank, len(place.ranks), make.Options(default))
    else:
        holder = make(place.store, place.rank, len(place.ranks))
        holder._set_default_backend(types[default])
    made: dict[str, Any] = {}
    for kind, name in others.items():
        if name not in made:
            made[name] = _made(name, kind, place, backend_options)
        holder._register_backend(torch.device(kind), types[name], made[name])
    holder._set_group_name(place.name)
    return {kind: holder for kind in others}


def _made(name: str, kind: str, place: Place, backend_options: Any) -> Any:
    """A backend as torch would make it."""
    store = dist.PrefixStore(f"{kind}/", place.store)
    size = len(place.ranks)
    if hasattr(dist.Backend, "_ensure_backend_registered"):
        dist.Backend._ensure_backend_registered(name)
    plugin = dist.Backend._plugins.get(name.upper())
    if plugin is None and name == "gloo":
        return dist.ProcessGroupGloo(store, place.rank, size, timeout=place.timeout)
    if plugin is None and name == "nccl":
        options = backend_options or dist.ProcessGroupNCCL.Options()
        options._timeout = place.timeout
        return dist.ProcessGroupNCCL(store, place.rank, size, options)
    if plugin is None:
        raise ValueError(
            f"beside drumline this torch may have gloo, nccl and backends of other packages, and not {name}"
        )
    if not plugin.extended_api:
        return plugin.creator_fn(store, place.rank, size, place.timeout)
    told = SimpleNamespace(
        store=store,
        group_rank=place.rank,
        group_size=size,
        timeout=place.timeout,
        group_id=place.name,
        global_ranks_in_group=place.ranks,
        process_group=None,
        split_from=None,
        enable_reconfigure=False,
    )
    return plugin.creator_fn(told, backend_options)
