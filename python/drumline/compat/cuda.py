"""The CPU in the place of GPUs, for programs that ask ``torch.cuda`` on a machine without."""

from __future__ import annotations

import functools
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch

# Functions that make tensors where ``device=`` says.
_FACTORIES = ("arange", "as_tensor", "empty", "full", "ones", "rand", "randint", "randn", "tensor", "zeros")

_current: int | None = None


def stand_in() -> None:
    """Only what would raise otherwise is replaced; whether there are GPUs is answered differently to
    HaiScale's own modules alone."""
    if torch.cuda.is_available() or hasattr(torch.cuda.is_available, "_drumline"):
        return
    is_available = torch.cuda.is_available

    def answered() -> bool:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        return caller.split(".")[0] == "haiscale" or bool(is_available())

    answered._drumline = True  # type: ignore[attr-defined]
    torch.cuda.is_available = answered
    torch.cuda.current_device = _current_device
    torch.cuda.set_device = _set_device
    torch.cuda.synchronize = lambda device=None: None
    torch.nn.Module.cuda = _stays
    torch.Tensor.cuda = _stays
    for kind in (torch.nn.Module, torch.Tensor):
        kind.to = _on_cpu(kind.to, 1)
    for name in _FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name), None))


def _on_cpu(function: Callable[..., Any], place: int | None) -> Callable[..., Any]:
    """The function, for which a GPU means the CPU: as ``device``, and as the argument at this place."""

    @functools.wraps(function, updated=())
    def call(*args: Any, **kwargs: Any) -> Any:
        if place is not None and len(args) > place and _is_gpu(args[place]):
            args = (*args[:place], "cpu", *args[place + 1 :])
        if _is_gpu(kwargs.get("device")):
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)

    return call


def _is_gpu(device: Any) -> bool:
    if isinstance(device, int) and not isinstance(device, bool):
        return True
    return isinstance(device, str | torch.device) and str(device).startswith("cuda")


def _current_device() -> int:
    return int(os.environ.get("LOCAL_RANK", "0")) if _current is None else _current


def _set_device(device: Any) -> None:
    global _current
    _say_once()
    number = device if isinstance(device, int) else torch.device(device).index
    _current = number if number is not None and number >= 0 else _current


def _stays(self: Any, *_args: Any, **_kwargs: Any) -> Any:
    _say_once()
    return self


@functools.cache
def _say_once() -> None:
    warnings.warn("this machine has no GPU: cuda means the CPU (drumline.compat)", stacklevel=3)
