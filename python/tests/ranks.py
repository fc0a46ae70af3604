"""Runs a function on several ranks, each in its own process."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from typing import Any

# To tell a hang from a slow machine.
LIMIT_S = 120.0


def run(
    world_size: int, function: Callable[..., Any], *args: Any, limit_s: float = LIMIT_S
) -> list[Any]:
    """Calls ``function(rank, world_size, directory, *args)`` on every rank. Returns the results by rank."""
    outcomes = run_and_see(world_size, function, *args, limit_s=limit_s)
    for rank, (how, what) in enumerate(outcomes):
        assert how == "returned", f"rank {rank} {how} {what}"
    return [what for _, what in outcomes]


def run_and_see(
    world_size: int, function: Callable[..., Any], *args: Any, limit_s: float = LIMIT_S
) -> list[tuple[str, Any]]:
    """Like `run`, but each result is ``("returned", value)``, ``("raised", text)``, ``("exited", code)`` for
    a rank that ended without a report, or ``("hangs", None)``."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as directory:
        pipes, processes = [], []
        for rank in range(world_size):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_report,
                args=(theirs, function, rank, world_size, directory, args, limit_s),
            )
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        until = time.monotonic() + limit_s
        outcomes = []
        for pipe, process in zip(pipes, processes, strict=True):
            outcomes.append(_outcome(pipe, process, until))
        for process in processes:
            process.kill()
            process.join()
    return outcomes


def _outcome(pipe: Any, process: Any, until: float) -> tuple[str, Any]:
    if not pipe.poll(max(0.0, until - time.monotonic())):
        return "hangs", None
    try:
        outcome: tuple[str, Any] = pipe.recv()
    except EOFError:
        process.join(max(0.0, until - time.monotonic()))
        return "exited", process.exitcode
    process.join(max(0.0, until - time.monotonic()))
    if process.exitcode != 0:
        return "exited", process.exitcode
    return outcome


def _report(
    pipe: Any, function: Any, rank: int, world_size: int, directory: str, args: Any, limit_s: float
) -> None:
    # Where it hangs, if it does.
    faulthandler.dump_traceback_later(0.9 * limit_s, file=sys.__stderr__)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    try:
        pipe.send(("returned", function(rank, world_size, directory, *args)))
    except BaseException as error:
        text = f"{type(error).__module__}.{type(error).__qualname__}: {error}"
        pipe.send(("raised", text + "\n" + traceback.format_exc()))


def wait_for(path: str) -> None:
    """Waits until another rank has made the file."""
    while not os.path.exists(path):
        time.sleep(0.01)
