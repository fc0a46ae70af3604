"""Events for torch's profiler, as the backends in C++ leave them."""

from __future__ import annotations

from typing import Any

import torch
from torch._C._profiler import _RecordFunctionFast

from drumline import _core
from drumline.torch.work import when_all_ended


def begin(title: str, tensors: list[torch.Tensor]) -> Any:
    """Begins an event if somebody profiles."""
    if not torch.autograd._profiler_enabled():
        return None
    event = _RecordFunctionFast(title, tensors, {})
    event.__enter__()
    return event


def end(event: Any, handles: list[_core.Work]) -> None:
    """Ends the event when the operations have, on another thread: so it counts as asynchronous."""
    if event is None:
        return
    if not handles:
        event.__exit__(None, None, None)
        return
    when_all_ended(handles, lambda _: event.__exit__(None, None, None))
