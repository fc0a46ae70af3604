"""Events for torch's profiler, as the backends in C++ leave them."""

from __future__ import annotations

import os
import queue
import threading

import torch
from torch._C._profiler import _RecordFunctionFast

from drumline import _core
from drumline.torch.register import version_of
from drumline.torch.work import when_all_ended


class Event:
    """An event that ends on another thread than it began on. So it counts as asynchronous, like the events
    of torch's own backends, which never work on the caller's thread.

    Dropping the last reference to torch's object ends the event once more. So only this class holds one.
    """

    __slots__ = ("_inner", "_thread")

    def __init__(self, title: str, tensors: list[torch.Tensor]) -> None:
        self._inner = [_RecordFunctionFast(title, tensors, {})]
        self._thread = threading.get_ident()
        self._inner[0].__enter__()

    def end_here(self) -> None:
        self._inner.pop().__exit__(None, None, None)

    def end(self, _: object = None) -> None:
        if threading.get_ident() == self._thread:
            _Ender.of_this_process().end(self)
        else:
            self.end_here()


def begin(title: str, tensors: list[torch.Tensor]) -> Event | None:
    """Begins an event if a profiler runs."""
    return Event(f"drumline:{title}", tensors) if is_on() else None


def end(event: Event | None, handles: list[_core.Work]) -> None:
    """Ends the event when the calls have ended. An older torch loses an event that ends on another thread, so there
    it ends with the part of the call that is on this one."""
    if event is None:
        return
    if _ENDS_ELSEWHERE:
        when_all_ended(handles, event.end)
    else:
        event.end_here()


is_on = torch.autograd._profiler_enabled
_ENDS_ELSEWHERE = version_of(torch.__version__) >= (2, 14)


class _Ender:
    """A thread that ends what has ended on the caller's thread."""

    _known: dict[int, _Ender] = {}

    @staticmethod
    def of_this_process() -> _Ender:
        process = os.getpid()
        if process not in _Ender._known:
            _Ender._known = {process: _Ender()}
        return _Ender._known[process]

    def __init__(self) -> None:
        self._events: queue.SimpleQueue[tuple[Event, threading.Event]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="drumline-profile", daemon=True).start()

    def end(self, event: Event) -> None:
        ended = threading.Event()
        self._events.put((event, ended))
        ended.wait()

    def _run(self) -> None:
        while True:
            event, ended = self._events.get()
            event.end()
            ended.set()
