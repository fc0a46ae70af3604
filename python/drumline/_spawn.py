"""Ranks as processes of this program."""

from __future__ import annotations

import math
import multiprocessing
import multiprocessing.connection
import os
import secrets
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from drumline import _core

# Time limit, in seconds, for the other processes to end after one has failed.
_GRACE_S = 5.0

# The same for what the core has logged.
_LOG_S = 5.0

# The system does not wait for any number of seconds at once.
_WAIT_MAX_S = 3600.0


class ProcessRaisedError(RuntimeError):
    """A rank has raised or was killed. The text contains its traceback."""

    def __init__(self, text: str, error_index: int, exit_code: int | None) -> None:
        super().__init__(text)
        self.error_index, self.exit_code = error_index, exit_code


def spawn(
    fn: Callable[..., Any],
    args: tuple[Any, ...] = (),
    nprocs: int = 1,
    join: bool = True,
    daemon: bool = False,
    start_method: str = "spawn",
) -> SpawnContext | None:
    """Runs ``fn(rank, *args)`` in ``nprocs`` new processes and waits until all have ended.

    The processes call ``init_process_group()`` to connect: their environment is as under ``drumline run
    --no-torch-store``, with a secret of their own, and this process hosts their store on a Unix socket. If one process fails, the others are terminated, and
    `ProcessRaisedError` contains its traceback. ``join=False`` returns a context whose ``join`` waits.
    """
    context = SpawnContext(fn, args, nprocs, daemon, start_method)
    if not join:
        return context
    while not context.join():
        pass
    return None


class SpawnContext:
    """The processes of a `spawn`."""

    def __init__(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        nprocs: int,
        daemon: bool,
        start_method: str,
    ) -> None:
        self._store = _core.JobStore(f"drumline-spawn-{secrets.token_hex(8)}")
        context: Any = multiprocessing.get_context(start_method)
        self.processes: list[BaseProcess] = []
        self._reports: list[Connection] = []
        for rank in range(nprocs):
            report, theirs = context.Pipe(duplex=False)
            place = _environment(rank, nprocs, self._store)
            process = context.Process(
                target=_run, args=(fn, rank, args, place, theirs), daemon=daemon
            )
            process.start()
            theirs.close()
            self.processes.append(process)
            self._reports.append(report)

    def pids(self) -> list[int | None]:
        """The process ids."""
        return [process.pid for process in self.processes]

    def join(self, timeout: float | None = None) -> bool:
        """Waits at most ``timeout`` seconds. Returns whether all processes have ended without an error.

        When one process has failed, terminates the others and raises `ProcessRaisedError`.
        """
        if timeout is not None and not timeout >= 0:
            raise ValueError(f"timeout is {timeout}; it should be seconds, 0 or more")
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while True:
            living = [process for process in self.processes if process.is_alive()]
            failed = next((it for it in self.processes if it.exitcode not in (None, 0)), None)
            if failed is not None:
                raise self._error(failed)
            if not living:
                return True
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            sentinels = [process.sentinel for process in living]
            multiprocessing.connection.wait(sentinels, min(left, _WAIT_MAX_S))

    def _error(self, failed: BaseProcess) -> ProcessRaisedError:
        self._end_all()
        # The first error is the cause; the errors of other ranks often follow from it.
        reports = [self._report(rank) for rank in range(len(self.processes))]
        raised = [(at, rank, text) for rank, (at, text) in enumerate(reports) if text]
        if raised:
            _, rank, text = min(raised)
        else:
            rank = self.processes.index(failed)
            code = failed.exitcode or 0
            how = f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
            text = f"it {how}"
        exit_code = self.processes[rank].exitcode
        return ProcessRaisedError(
            f"-- Process {rank} terminated with the following error:\n{text}", rank, exit_code
        )

    def _report(self, rank: int) -> tuple[float, str]:
        try:
            if self._reports[rank].poll():
                at, text = self._reports[rank].recv()
                return float(at), str(text)
        except (EOFError, OSError):
            pass
        return 0.0, ""

    def _end_all(self) -> None:
        for process in self.processes:
            process.terminate()
        until = time.monotonic() + _GRACE_S
        for process in self.processes:
            process.join(max(0.0, until - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()


def _environment(rank: int, world_size: int, store: _core.JobStore) -> dict[str, str]:
    place = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "DRUMLINE_STORE": store.endpoint,
    }
    if store.secret is not None:
        place["DRUMLINE_SECRET"] = store.secret
    return place


def _run(
    fn: Callable[..., Any],
    rank: int,
    args: tuple[Any, ...],
    place: dict[str, str],
    report: Connection,
) -> None:
    # The place of an outer job is not that of this rank.
    for name in ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"):
        os.environ.pop(name, None)
    os.environ.update(place)
    try:
        fn(rank, *args)
    except Exception:
        report.send((time.time(), traceback.format_exc()))
        _core.close_log(_LOG_S)
        # As after an uncaught exception: the other ranks see this process end.
        os._exit(1)
