"""What a process of `spawn` does."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from drumline import _core

# What a process reports before it calls the function.
BEGUN = "begun"

# What it reports when the function has returned.
RETURNED = "returned"

# Time limit, in seconds, for what the core has logged.
_LOG_S = 5.0

# A pipe takes 64 KiB, and nobody reads it before the process has ended.
_TEXT_MAX = 32 << 10

# The exit code of a process that Ctrl-C has ended, as in a shell.
_INTERRUPTED = 130

# What tells a rank of an outer job where it is.
_OF_OUTER_JOB = (
    "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE", "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_SIGNALS_TO_HANDLE",
    "TORCHELASTIC_USE_AGENT_STORE", "DRUMLINE_LAUNCHER", "DRUMLINE_STEPS", "DRUMLINE_SPAWN",
)


def run(
    fn: Callable[..., Any], rank: int, args: tuple[Any, ...], place: dict[str, str], report: Connection
) -> None:
    """Calls the function in the place of this rank. An exception is reported, and ends the process."""
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid is not None:
        _core.end_with_parent(parent.pid)
    _take_signals()
    for name in _OF_OUTER_JOB:
        os.environ.pop(name, None)
    if "DRUMLINE_SECRET" in place:
        os.environ.pop("DRUMLINE_SECRET_FILE", None)
    os.environ.update(place)
    report.send(BEGUN)
    try:
        fn(rank, *args)
        _tell_return(report)
    except SystemExit as ended:
        if ended.code in (None, 0):
            _tell_return(report)
        raise
    except Exception:
        _tell(report, 1)
    except KeyboardInterrupt:
        # The parent's end interrupts this process, too, and nobody is left to hear of it.
        if parent is None or parent.is_alive():
            _tell(report, _INTERRUPTED)


def _tell_return(report: Connection) -> None:
    with contextlib.suppress(OSError):
        report.send(RETURNED)


def _take_signals() -> None:
    """Signals as a shell would give them: what the parent blocks is not blocked here, and how children end is known."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    if signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def _tell(report: Connection, code: int) -> None:
    text = traceback.format_exc()
    if len(text) > _TEXT_MAX:
        half = _TEXT_MAX // 2
        text = f"{text[:half]}\n... {len(text) - _TEXT_MAX} characters ...\n{text[-half:]}"
    with contextlib.suppress(OSError):
        report.send((time.time(), text))
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    _core.close_log(_LOG_S)
    # As after an uncaught exception: the other ranks see this process end.
    os._exit(code)
