"""Ranks as processes of this program."""

from __future__ import annotations

import math
import multiprocessing
import multiprocessing.connection
import pickle
import secrets
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from drumline import _core, _pickling, _spawned

# How many seconds processes get between SIGTERM and SIGKILL, unless `join` is told.
_GRACE_S = 30.0

# The system does not wait for any number of seconds at once.
_WAIT_MAX_S = 3600.0

# What to do with functions that other interpreters do not find.
_INSTEAD = 'call start_processes(..., start_method="fork"), which copies this process'

# For so many seconds after the first failure the others are not told to end: they may have failed for the same reason,
# or before, and end later.
_SETTLE_S = 0.1


class ProcessException(RuntimeError):
    """A process of `spawn` or `start_processes` has failed. The others have ended."""

    def __init__(self, msg: str, error_index: int, pid: int) -> None:
        super().__init__(msg)
        self.msg = msg
        self.error_index = error_index
        """The number of the process, which is its rank."""
        self.pid = pid
        """Its process id."""
        self.exit_code = 1
        """Its exit code; -n if signal n has killed it."""

    @property
    def error_pid(self) -> int:
        """Its process id."""
        return self.pid

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.msg, self.error_index, self.pid)


# The name of former versions.
ProcessRaisedError = ProcessException


class ProcessRaisedException(ProcessException):
    """The function has raised. The text has its traceback."""

    def __init__(self, msg: str, error_index: int, error_pid: int) -> None:
        super().__init__(msg, error_index, error_pid)


class ProcessExitedException(ProcessException):
    """The process has ended without an exception: it has called ``exit``, or a signal has killed it."""

    def __init__(
        self, msg: str, error_index: int, error_pid: int, exit_code: int, signal_name: str | None = None
    ) -> None:
        super().__init__(msg, error_index, error_pid)
        self.exit_code = exit_code
        self.signal_name = signal_name
        """``SIGKILL``, for example; None if it has called ``exit``."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.msg, self.error_index, self.pid, self.exit_code, self.signal_name)


def spawn(
    fn: Callable[..., Any],
    args: tuple[Any, ...] = (),
    nprocs: int = 1,
    join: bool = True,
    daemon: bool = False,
    start_method: str = "spawn",
) -> ProcessContext | None:
    """Runs ``fn(rank, *args)`` in ``nprocs`` new processes and waits until all have ended.

    The processes call ``init_process_group()`` to connect, with a secret of their own; this process hosts their store
    on a Unix socket. torch's ``init_process_group("drumline")`` connects them as well: its store is at ``MASTER_PORT``
    of this host, a free port. ::

        def train(rank, epochs):
            with drumline.init_process_group():
                ...

        if __name__ == "__main__":
            drumline.spawn(train, args=(3,), nprocs=2)

    If one process fails, the others are terminated. The error is `ProcessRaisedException`, with the traceback of
    the process, or `ProcessExitedException`. ``join=False`` returns a context, whose ``join`` waits.

    The processes end when this one does, also if it is killed.
    """
    return start_processes(fn, args, nprocs, join, daemon, start_method)


def start_processes(
    fn: Callable[..., Any],
    args: tuple[Any, ...] = (),
    nprocs: int = 1,
    join: bool = True,
    daemon: bool = False,
    start_method: str = "spawn",
) -> ProcessContext | None:
    """The same as `spawn`.

    ``start_method`` is one of multiprocessing's. ``spawn`` and ``forkserver`` start fresh interpreters, which import
    the module of ``fn``. ``fork`` copies this process, so ``fn`` may be any function; but a copy of a process with
    threads may hang.
    """
    context = ProcessContext(fn, args, nprocs, daemon, start_method)
    if not join:
        return context
    try:
        context.join()
    except BaseException:
        # Ctrl-C, for example.
        context.end()
        raise
    return None


class ProcessContext:
    """The processes of a `spawn`."""

    def __init__(
        self, fn: Callable[..., Any], args: tuple[Any, ...], nprocs: int, daemon: bool, start_method: str
    ) -> None:
        context: Any = multiprocessing.get_context(start_method)
        if start_method != "fork" and not _pickling.is_importable(fn):
            raise _pickling.not_importable(fn, _INSTEAD)
        self._store = _core.JobStore(f"drumline-spawn-{secrets.token_hex(8)}")
        self._port = _reserved_port()
        self.processes: list[BaseProcess] = []
        self._reports: list[Connection] = []
        self._error: ProcessException | None = None
        try:
            for rank in range(nprocs):
                report, theirs = context.Pipe(duplex=False)
                self._reports.append(report)
                place = _environment(rank, nprocs, self._store, self._port.getsockname())
                process = context.Process(
                    target=_spawned.run, args=(fn, rank, args, place, theirs), daemon=daemon
                )
                process.start()
                theirs.close()
                self.processes.append(process)
        except (AttributeError, TypeError, pickle.PicklingError) as error:
            self.end()
            raise _pickling.not_picklable(fn, args, error, _INSTEAD) from error
        except BaseException:
            self.end()
            raise
        self.sentinels = {process.sentinel: rank for rank, process in enumerate(self.processes)}
        """What becomes ready when a process ends, and the number of the process."""

    def pids(self) -> list[int | None]:
        """The process ids."""
        return [process.pid for process in self.processes]

    def join(self, timeout: float | None = None, grace_period: float | None = None) -> bool:
        """Waits at most ``timeout`` seconds. Returns whether all processes have ended without an error.

        When one process has failed, ends the others and raises a `ProcessException`. The others get ``grace_period``
        seconds to end by themselves, if it is given. Then they get SIGTERM, and SIGKILL after ``grace_period`` (30)
        seconds more.
        """
        for name, value in (("timeout", timeout), ("grace_period", grace_period)):
            if value is not None and not value >= 0:
                raise ValueError(f"{name} is {value}; it should be seconds, 0 or more")
        if self._error is not None:
            raise self._error
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while True:
            living = [process for process in self.processes if process.is_alive()]
            failed = [
                rank for rank, process in enumerate(self.processes) if process.exitcode not in (None, 0)
            ]
            if failed:
                self._error = self._end_after(failed, living, grace_period)
                raise self._error
            if not living:
                return True
            if _wait(living, deadline, any_of_them=True) and time.monotonic() >= deadline:
                return False

    def end(self, grace_period: float | None = None) -> None:
        """Ends all processes: SIGTERM, and SIGKILL after ``grace_period`` (30) seconds."""
        for process in self.processes:
            process.terminate()
        for process in _wait(self.processes, time.monotonic() + (_GRACE_S if grace_period is None else grace_period)):
            process.kill()
        for process in self.processes:
            process.join()

    def _end_after(
        self, failed: list[int], living: list[BaseProcess], grace_period: float | None
    ) -> ProcessException:
        """Ends all processes. The error of the one that is the likeliest cause: those of others often follow from it."""
        ends = dict.fromkeys(failed, time.time())
        _wait(living, time.monotonic() + max(_SETTLE_S, grace_period or 0.0))
        # What they say or do when they are told to end does not count.
        codes = [process.exitcode for process in self.processes]
        reports = [self._report(rank) for rank in range(len(codes))]
        self.end(grace_period)
        noticed_at = time.time()
        known: list[tuple[int | None, str | None, float]] = [
            (code, report.raised[1], report.raised[0])
            if report.raised
            else (code, None, ends.get(rank, noticed_at))
            for rank, (code, report) in enumerate(zip(codes, reports, strict=True))
        ]
        rank = _core.culprit(known)
        rank = failed[0] if rank is None else rank
        process, report = self.processes[rank], reports[rank]
        pid, code = process.pid or 0, process.exitcode or 0
        if report.raised is not None:
            text = f"\n\n-- Process {rank} terminated with the following error:\n{report.raised[1]}"
            error = ProcessRaisedException(text, rank, pid)
            error.exit_code = code
            return error
        name = _signal_name(-code) if code < 0 else None
        how = f"signal {name}" if name else f"exit code {code}"
        text = f"process {rank} terminated with {how}"
        if not report.has_begun:
            text += (
                " before it called the function. Its stderr says why: often the program starts its processes while "
                'it is imported, outside of `if __name__ == "__main__":`'
            )
        if codes[rank] is None:
            text += " when it was told to end, because another one had lost it"
            witnesses = [(it.raised, other) for other, it in enumerate(reports) if it.raised]
            if witnesses:
                (_, said), other = min(witnesses)
                text += f"\n\n-- Process {other} terminated with the following error:\n{said}"
        return ProcessExitedException(text, rank, pid, code, name)

    def _report(self, rank: int) -> _Report:
        report = _Report()
        with suppress(EOFError, OSError):
            while self._reports[rank].poll():
                message = self._reports[rank].recv()
                if message == _spawned.BEGUN:
                    report.has_begun = True
                else:
                    report.raised = message
        return report


class _Report:
    """What a process has told."""

    has_begun = False
    raised: tuple[float, str] | None = None


# The name of former versions.
SpawnContext = ProcessContext


def _wait(
    processes: list[BaseProcess], deadline: float, any_of_them: bool = False
) -> list[BaseProcess]:
    """Waits until all of them have ended, or ``any_of_them``. Returns those that live."""
    living = [process for process in processes if process.is_alive()]
    count = len(living)
    while living and not (any_of_them and len(living) < count):
        left = deadline - time.monotonic()
        if left <= 0:
            break
        multiprocessing.connection.wait([it.sentinel for it in living], min(left, _WAIT_MAX_S))
        living = [process for process in living if process.is_alive()]
    return living


def _reserved_port() -> socket.socket:
    """A port that nobody gets by chance: torch's store may listen there, since this socket does not."""
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("127.0.0.1", 0))
    return reserved


def _environment(
    rank: int, world_size: int, store: _core.JobStore, master: tuple[str, int]
) -> dict[str, str]:
    place = {
        "MASTER_ADDR": master[0],
        "MASTER_PORT": str(master[1]),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "DRUMLINE_STORE": store.endpoint,
    }
    if store.secret is not None:
        place["DRUMLINE_SECRET"] = store.secret
    return place


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"<Unknown signal {number}>"
