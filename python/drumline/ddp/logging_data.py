"""Settings and times of a wrapper."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

from drumline.groups import ProcessGroup

_ENVIRONMENT = ("MASTER_ADDR", "MASTER_PORT", "TORCH_DISTRIBUTED_DEBUG", "CUDA_VISIBLE_DEVICES")


def logging_data(model: Any) -> dict[str, Any]:
    """Settings of the wrapper, and how long its steps took (nanoseconds), as text and integers under the
    names of torch's ``_get_ddp_logging_data``.

    torch's fields about buckets have no match: drumline forms buckets anew in each step.
    """
    reducer = model.reducer
    parameters = reducer.parameters
    devices = model.device_ids or []
    modules = model.module.modules()
    data: dict[str, Any] = {
        "rank": reducer.group.rank,
        "world_size": reducer.group.world_size,
        "module_name": type(model.module).__name__,
        "backend_name": _backend_name(model.process_group),
        "dtypes": ", ".join(dict.fromkeys(_short(it.dtype) for it in parameters)),
        "device_ids": ", ".join(str(getattr(it, "index", it)) for it in devices),
        "output_device": -1 if model.output_device is None else _index(model.output_device),
        "num_parameter_tensors": len(parameters),
        "total_parameter_size_bytes": sum(it.nbytes for it in parameters),
        "unused_parameter_size": reducer.unused_bytes,
        "bucket_cap_bytes": model.bucket_bytes,
        "broadcast_buffers": model.forward_sync_buffers,
        "find_unused_parameters": model.find_unused_parameters,
        "gradient_as_bucket_view": model.gradient_as_bucket_view,
        "static_graph": model.static_graph,
        "is_multi_device_module": model.is_multi_device_module,
        "has_sync_bn": any("SyncBatchNorm" in type(it).__name__ for it in modules),
        "join_uneven_inputs": model._has_joined,
        "comm_hook": model._hook_name,
        "iteration": reducer.steps,
        **{name.lower(): os.environ.get(name, "N/A") for name in _ENVIRONMENT},
        **reducer.times.table(),
    }
    return {name: int(it) if isinstance(it, bool) else it for name, it in data.items()}


def _backend_name(process_group: Any) -> str:
    is_ours = isinstance(process_group, ProcessGroup)
    return "drumline" if is_ours else str(dist.get_backend(process_group))


def _short(dtype: torch.dtype) -> str:
    # torch reports the names of C++ here.
    return {"float32": "float", "float64": "double"}.get(name := str(dtype).split(".")[-1], name)


def _index(device: Any) -> int:
    return device if isinstance(device, int) else torch.device(device).index or 0
