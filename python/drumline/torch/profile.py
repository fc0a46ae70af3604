"""Events for torch's profiler, as the backends in C++ leave them."""

from __future__ import annotations

import os
import queue
import threading
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
    """Ends the event when the operations have ended.

    Always on another thread, so that it counts as asynchronous: torch's own backends never work on
    the caller's thread.
    """
    if event is None:
        return
    caller = threading.get_ident()

    def end_elsewhere(_: object = None) -> None:
        if threading.get_ident() == caller:
            _Ender.of_this_process().end(event)
        else:
            event.__exit__(None, None, None)

    when_all_ended(handles, end_elsewhere)


class _Ender:
    """A thread that ends events. It must outlive them: to torch, one that has gone is no other."""

    _known: dict[int, _Ender] = {}

    @staticmethod
    def of_this_process() -> _Ender:
        process = os.getpid()
        if process not in _Ender._known:
            _Ender._known = {process: _Ender()}
        return _Ender._known[process]

    def __init__(self) -> None:
        self._events: queue.SimpleQueue[tuple[Any, threading.Event]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="drumline-profile", daemon=True).start()

    def end(self, event: Any) -> None:
        ended = threading.Event()
        self._events.put((event, ended))
        ended.wait()

    def _run(self) -> None:
        while True:
            event, ended = self._events.get()
            event.__exit__(None, None, None)
            ended.set()
