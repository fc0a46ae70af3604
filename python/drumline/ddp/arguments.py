"""Checks of the wrapper's arguments: the module, and the devices of its parameters."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch._utils import _get_device_index


def check_parameters(module: torch.nn.Module) -> None:
    """Raises if no parameter is trained, or a parameter has no memory yet."""
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"DistributedDataParallel wraps a module, and this is a {type(module).__name__}")
    parameters = list(module.parameters())
    for name, parameter in module.named_parameters():
        if hasattr(parameter, "placements"):
            raise TypeError(
                f"parameter {name} is a DTensor, which lies on several ranks: use torch's FSDP2 or "
                "DistributedDataParallel, on the backend drumline"
            )
        if isinstance(parameter, torch.nn.parameter.UninitializedParameter):
            raise TypeError(
                "torch.nn.parameter.UninitializedParameter is not supported: run a batch through "
                "lazy modules first"
            )
    if not any(parameter.requires_grad for parameter in parameters):
        raise RuntimeError(
            "DistributedDataParallel is not needed when a module doesn't have any parameters that "
            "require a gradient"
        )


def delayed_names(
    module: torch.nn.Module, delayed: Iterable[tuple[str, Any]] | None, hooked: Any
) -> set[str]:
    """The parameters that torch would average later than others, by name."""
    if (delayed is None) != (hooked is None):
        raise ValueError(
            "delay_all_reduce_named_params and param_to_hook_all_reduce need to be set at the same time"
        )
    known, names = dict(module.named_parameters()), {name for name, _ in delayed or ()}
    if unknown := names - known.keys():
        raise ValueError(f"delay_all_reduce_named_params: the module has no {sorted(unknown)}")
    return names


def place(module: torch.nn.Module, device_ids: Sequence[Any] | None) -> Any:
    """The one device of the module, where it is moved to. None: the module stays where it is."""
    if not device_ids:
        return None
    if len(device_ids) > 1:
        raise ValueError("device_ids can only be None or contain a single element.")
    if not isinstance(device_ids[0], int) and torch.device(device_ids[0]).type == "cpu":
        return None
    if not torch.cuda.is_available():
        _say_once(f"device_ids={list(device_ids)} means the CPU: this machine has no GPU")
        return None
    if len({parameter.device for parameter in module.parameters()}) > 1:
        raise ValueError("device_ids must be None for a module on several devices")
    device = torch.device("cuda", _get_device_index(device_ids[0], True))
    module.to(device)
    return device


@functools.cache
def _say_once(text: str) -> None:
    warnings.warn(text, stacklevel=4)
