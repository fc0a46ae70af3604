"""Synchronous data-parallel training on drumline's Rust core.

With torch, nothing but a name changes::

    torch.distributed.init_process_group("drumline")

Without torch, on numpy arrays (or tensors, or whatever has ``__dlpack__``)::

    import drumline, numpy as np

    drumline.init_process_group()          # under `drumline run` or torchrun
    gradient = np.ones(1000, np.float32)
    drumline.all_reduce(gradient, "avg")   # the same bits on every rank
    drumline.destroy_process_group()
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from drumline import check, compat, ddp, device, launch, stores, torch
    from drumline._core import (
        CollectiveError,
        CollectiveMismatchError,
        CollectiveTimeoutError,
        ConnectError,
        DrumlineError,
        NotBroughtError,
        PoisonedError,
        StoreError,
        StoreTimeoutError,
        __version__,
    )
    from drumline._backends import (
        Backend,
        is_available,
        is_gloo_available,
        is_mpi_available,
        is_nccl_available,
        is_torchelastic_launched,
    )
    from drumline._futures import Future
    from drumline._non_member import GroupMember, group
    from drumline._operators import ReduceOp, reduce_op
    from drumline.ddp import DistributedDataParallel, SyncBatchNorm, convert_sync_batchnorm
    from drumline.default import (
        P2POp,
        all_gather,
        all_gather_into_tensor,
        all_gather_multigpu,
        all_gather_object,
        all_reduce,
        all_reduce_multigpu,
        all_to_all,
        all_to_all_single,
        alloc_registered,
        barrier,
        batch_isend_irecv,
        broadcast,
        broadcast_multigpu,
        broadcast_object_list,
        destroy_process_group,
        gather,
        gather_object,
        get_backend,
        get_global_rank,
        get_group_rank,
        get_process_group_ranks,
        get_rank,
        get_world_size,
        init_process_group,
        irecv,
        isend,
        metrics_text,
        monitored_barrier,
        new_group,
        recv,
        recv_object_list,
        reduce,
        reduce_multigpu,
        reduce_scatter,
        reduce_scatter_multigpu,
        reduce_scatter_tensor,
        scatter,
        scatter_object_list,
        send,
        send_object_list,
        split_group,
    )
    from drumline.elastic import ElasticGroup
    from drumline.groups import ProcessGroup, Work
    from drumline.sampler import DistributedSampler, evaluation_shard
    from drumline._spawn import (
        ProcessContext,
        ProcessException,
        ProcessExitedException,
        ProcessRaisedError,
        ProcessRaisedException,
        spawn,
        start_processes,
    )
    from drumline._world import is_initialized
    from drumline.stores import FileStore, HashStore, PrefixStore, Store, TCPStore

__all__ = [
    "Backend",
    "CollectiveError",
    "CollectiveMismatchError",
    "CollectiveTimeoutError",
    "ConnectError",
    "DistributedSampler",
    "DrumlineError",
    "ElasticGroup",
    "FileStore",
    "Future",
    "GroupMember",
    "HashStore",
    "NotBroughtError",
    "P2POp",
    "PoisonedError",
    "PrefixStore",
    "ProcessContext",
    "ProcessException",
    "ProcessExitedException",
    "ProcessGroup",
    "ProcessRaisedError",
    "ProcessRaisedException",
    "ReduceOp",
    "Store",
    "StoreError",
    "StoreTimeoutError",
    "TCPStore",
    "Work",
    "__version__",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_multigpu",
    "all_gather_object",
    "all_reduce",
    "all_reduce_multigpu",
    "all_to_all",
    "all_to_all_single",
    "alloc_registered",
    "barrier",
    "batch_isend_irecv",
    "broadcast",
    "broadcast_multigpu",
    "broadcast_object_list",
    "destroy_process_group",
    "evaluation_shard",
    "gather",
    "gather_object",
    "get_backend",
    "get_global_rank",
    "get_group_rank",
    "get_process_group_ranks",
    "get_rank",
    "get_world_size",
    "group",
    "init_process_group",
    "irecv",
    "is_available",
    "is_gloo_available",
    "is_initialized",
    "is_mpi_available",
    "is_nccl_available",
    "is_torchelastic_launched",
    "isend",
    "metrics_text",
    "monitored_barrier",
    "new_group",
    "recv",
    "recv_object_list",
    "reduce",
    "reduce_multigpu",
    "reduce_op",
    "reduce_scatter",
    "reduce_scatter_multigpu",
    "reduce_scatter_tensor",
    "scatter",
    "scatter_object_list",
    "send",
    "send_object_list",
    "spawn",
    "split_group",
    "start_processes",
    "step",
]

# Looked up when used: the launcher, which is here as well, starts faster without numpy.
_MODULES = {
    "drumline._core": ["CollectiveError", "CollectiveMismatchError", "CollectiveTimeoutError", "ConnectError", "DrumlineError", "NotBroughtError", "PoisonedError", "StoreError", "StoreTimeoutError", "__version__", "step"],
    "drumline._backends": ["Backend", "is_available", "is_gloo_available", "is_mpi_available", "is_nccl_available", "is_torchelastic_launched"],
    "drumline._futures": ["Future"],
    "drumline._non_member": ["GroupMember", "group"],
    "drumline._operators": ["ReduceOp", "reduce_op"],
    "drumline._world": ["is_initialized"],
    "drumline.elastic": ["ElasticGroup"],
    "drumline.groups": ["ProcessGroup", "Work"],
    "drumline.sampler": ["DistributedSampler", "evaluation_shard"],
    "drumline._spawn": ["ProcessContext", "ProcessException", "ProcessExitedException", "ProcessRaisedError", "ProcessRaisedException", "spawn", "start_processes"],
    "drumline.stores": ["FileStore", "HashStore", "PrefixStore", "Store", "TCPStore"],
    "drumline.ddp": ["DistributedDataParallel", "SyncBatchNorm", "convert_sync_batchnorm"],
}
# Not in __all__: they need torch, and `from drumline import *` does without.
_WITH_TORCH = _MODULES["drumline.ddp"]
_HOME = {name: module for module, names in _MODULES.items() for name in names}


# Modules that need no import of their own: `drumline.ddp.fp16_compress`.
_SUBMODULES = ["check", "compat", "ddp", "device", "launch", "stores", "torch"]


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return import_module(f"drumline.{name}")
    if name not in __all__ and name not in _WITH_TORCH:
        raise AttributeError(f"module 'drumline' has no attribute {name!r}")
    value = getattr(import_module(_HOME.get(name, "drumline.default")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, *_WITH_TORCH, *_SUBMODULES]
