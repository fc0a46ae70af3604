"""Ranks as processes of this program."""

from __future__ import annotations

import math
import multiprocessing
import multiprocessing.connection
import os
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

# The exit code of a process if the system does not tell it, as in multiprocessing and asyncio.
_UNKNOWN = 255


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
        """Its exit code; -n if signal n has killed it; 255 if it is not known, which the text says."""

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

    If this process ignores SIGCHLD, or other code of it collects all children, the system does not tell how a process
    has ended. Then a process whose function has returned has ended well, and any other one has failed.
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
        self._members: list[_Member] = []
        self._error: ProcessException | None = None
        try:
            for rank in range(nprocs):
                report, theirs = context.Pipe(duplex=False)
                place = _environment(rank, nprocs, self._store, self._port.getsockname())
                process = context.Process(
                    target=_spawned.run, args=(fn, rank, args, place, theirs), daemon=daemon
                )
                _start(process)
                theirs.close()
                self.processes.append(process)
                self._members.append(_Member(process, report, is_child=start_method != "forkserver"))
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
            living = [member for member in self._members if not member.has_ended()]
            failed = [rank for rank, member in enumerate(self._members) if member.has_failed()]
            if failed:
                self._error = self._end_after(failed, living, grace_period)
                raise self._error
            if not living:
                return True
            if _wait(living, deadline, any_of_them=True) and time.monotonic() >= deadline:
                return False

    def end(self, grace_period: float | None = None) -> None:
        """Ends all processes: SIGTERM, and SIGKILL after ``grace_period`` (30) seconds."""
        for member in self._members:
            member.signal(signal.SIGTERM)
        for member in _wait(self._members, time.monotonic() + (_GRACE_S if grace_period is None else grace_period)):
            member.signal(signal.SIGKILL)
        _wait(self._members, math.inf)
        for process in self.processes:
            process.join()

    def _end_after(
        self, failed: list[int], living: list[_Member], grace_period: float | None
    ) -> ProcessException:
        """Ends all processes. The error of the one that is the likeliest cause: those of others often follow from it."""
        ends = dict.fromkeys(failed, time.time())
        _wait(living, time.monotonic() + max(_SETTLE_S, grace_period or 0.0))
        # What they say or do when they are told to end does not count.
        codes = [member.code() if member.has_ended() else None for member in self._members]
        reports = [member.report() for member in self._members]
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
        member, report = self._members[rank], reports[rank]
        pid, code = self.processes[rank].pid or 0, member.code()
        if report.raised is not None:
            text = f"\n\n-- Process {rank} terminated with the following error:\n{report.raised[1]}"
            error = ProcessRaisedException(text, rank, pid)
            error.exit_code = code
            return error
        name = _signal_name(-code) if code < 0 else None
        how = f" with signal {name}" if name else f" with exit code {code}"
        text = f"process {rank} terminated{'' if member.is_unknown else how}"
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
        if member.is_unknown:
            text += "\n\nHow it ended is not known: this process ignores SIGCHLD, or other code of it collects all children"
        return ProcessExitedException(text, rank, pid, code, name)


class _Report:
    """What a process has told."""

    has_begun = False
    has_returned = False
    raised: tuple[float, str] | None = None


class _Member:
    """A process, and how it has ended."""

    def __init__(self, process: BaseProcess, reports: Connection, is_child: bool) -> None:
        self._process, self._reports, self._told = process, reports, _Report()
        self.is_unknown = False
        """Whether the process has ended and nobody knows how."""
        self._pidfd: Connection | None = None
        pid = process.pid
        if is_child and pid is not None:
            # If it has ended and nothing is left of it, the sentinel says so.
            with suppress(OSError):
                self._pidfd = Connection(os.pidfd_open(pid), writable=False)
        # A process that it has forked may keep the sentinel open. The fork server knows how its children end, and tells
        # it by the sentinel.
        self._end: Connection | int = self._pidfd or process.sentinel

    def end(self) -> Connection | int:
        """What becomes ready when it ends."""
        return self._end

    def has_ended(self) -> bool:
        if self._process.exitcode is not None:
            return True
        if not multiprocessing.connection.wait([self._end], 0):
            return False
        popen: Any = self._process._popen  # type: ignore[attr-defined]
        try:
            os.waitid(os.P_PID, popen.pid, os.WEXITED | os.WNOWAIT)
        except ChildProcessError:
            if self._process.exitcode is None:
                # From now on multiprocessing knows, too, that it has ended, and signals no other process of its number.
                self.is_unknown, popen.returncode = True, _UNKNOWN
        return self._process.exitcode is not None

    def has_failed(self) -> bool:
        if not self.has_ended():
            return False
        return not self.report().has_returned if self.is_unknown else self._process.exitcode != 0

    def code(self) -> int:
        """Its exit code, once it has ended."""
        if self.is_unknown and self.report().has_returned:
            return 0
        return self._process.exitcode or 0

    def signal(self, number: signal.Signals) -> None:
        if self.has_ended():
            return
        with suppress(ProcessLookupError):
            if self._pidfd is not None:
                signal.pidfd_send_signal(self._pidfd.fileno(), number)
            elif number == signal.SIGKILL:
                self._process.kill()
            else:
                self._process.terminate()

    def report(self) -> _Report:
        """What it has told so far."""
        with suppress(EOFError, OSError):
            while self._reports.poll():
                message = self._reports.recv()
                if message == _spawned.BEGUN:
                    self._told.has_begun = True
                elif message == _spawned.RETURNED:
                    self._told.has_returned = True
                else:
                    self._told.raised = message
        return self._told


# The name of former versions.
SpawnContext = ProcessContext


def _wait(members: list[_Member], deadline: float, any_of_them: bool = False) -> list[_Member]:
    """Waits until all of them have ended, or ``any_of_them``. Returns those that live."""
    living = [member for member in members if not member.has_ended()]
    while living and not (any_of_them and len(living) < len(members)):
        left = deadline - time.monotonic()
        if left <= 0:
            break
        multiprocessing.connection.wait([it.end() for it in living], min(left, _WAIT_MAX_S))
        living = [member for member in living if not member.has_ended()]
    return living


def _start(process: BaseProcess) -> None:
    """The fork server hears by SIGCHLD how its children end, and blocks what is blocked when it starts."""
    blocked = signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


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
