"""Closes groups that are still open when the interpreter ends, and what a handler of a signal closes."""

from __future__ import annotations

import atexit
import logging
import sys
import threading
import weakref
from contextlib import suppress

from drumline import _core

_log = logging.getLogger(__name__)

_Open = _core.Group | _core.AsyncReduce | _core.ElasticGroup

# Time limit, in seconds, for callbacks that are running or about to run.
_PATIENCE_S = 5.0

# How long a handler of a signal waits for other ranks, which may wait for what it interrupts.
HANDLER_PATIENCE_S = 0.5

_groups: weakref.WeakSet[_Open] = weakref.WeakSet()


def watch(group: _Open) -> None:
    """Closes the group when the interpreter ends, if the group is still open then.

    After an uncaught exception the group stays open. So the other ranks see that this process has ended,
    instead of a group that was closed in good order.
    """
    if not _groups:
        atexit.unregister(_at_exit)
        atexit.register(_at_exit)
    _groups.add(group)


def watched() -> list[_Open]:
    """All that were made and are still referred to."""
    while True:
        with suppress(RuntimeError):  # another thread has made a group meanwhile
            return list(_groups)


def in_handler() -> bool:
    """Whether a handler of a signal has called the caller of this, at whatever place it has interrupted the program. A
    handler gets the frame that it interrupts, which is also the frame below its own."""
    if threading.current_thread() is not threading.main_thread():
        return False
    frame = sys._getframe(1)
    while (below := frame.f_back) is not None:
        for value in frame.f_locals.values():
            # Of ``def handler(*_)`` it is a tuple.
            if type(value) is tuple and len(value) == 2:
                value = value[1]
            if value is below:
                return True
        frame = below
    return False


def _at_exit() -> None:
    failed = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    for group in watched():
        if failed is not None:
            group.forget()
        elif not group.is_destroyed:
            with suppress(_core.DrumlineError):  # of a rank that has died: nothing is left to be done
                group.drop()
    if failed is None and not _core.wait_for_callbacks(_PATIENCE_S):
        _log.warning("the interpreter ends before callbacks have returned, after %s s", _PATIENCE_S)
