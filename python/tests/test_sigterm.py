"""Programs that leave their group and end in a handler of SIGTERM, as many do: amid calls, on one rank and on all.

The long form is for `make soak`: DRUMLINE_SOAK=1.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import multiprocessing.connection
import os
import random
import signal
import sys
import tempfile
import time
from datetime import timedelta

import numpy as np
import pytest
from torch_versions import needs_backends

import drumline

IS_LONG = os.environ.get("DRUMLINE_SOAK", "0") != "0"
TRIALS = 100 if IS_LONG else 4

# To tell a hang from a slow machine. The time limit of the calls is longer.
LIMIT_S = 60.0
NEVER_S = 1000.0

LEFT, TOLD, HEARD = 0, 4, 5
"""Exit codes: in the handler; there, after an error of the other rank, which was in a call; after a call that failed."""

OVER_SOCKETS = {"DRUMLINE_SHARED_MEMORY": "0"}
OVER_TCP = OVER_SOCKETS | {"DRUMLINE_UNIX_SOCKETS": "0"}
TRANSPORTS = {
    "shm": {},
    "unix": OVER_SOCKETS,
    "tcp": OVER_TCP,
    "tls": OVER_TCP | {"DRUMLINE_SECURITY": "tls", "DRUMLINE_SECRET": "of the tests of signals"},
}


def with_numpy(rank, url):
    drumline.init_process_group(url, rank=rank, world_size=2, timeout=NEVER_S)
    return lambda: drumline.all_reduce(np.ones(10)), drumline.destroy_process_group


def with_torch(rank, url):
    import torch
    import torch.distributed as dist

    import drumline.torch

    limit = timedelta(seconds=NEVER_S)
    dist.init_process_group("drumline", init_method=url, rank=rank, world_size=2, timeout=limit)
    return lambda: dist.all_reduce(torch.ones(10)), dist.destroy_process_group


LIBRARIES = {"numpy": with_numpy, "torch": with_torch}


def calls_until_sigterm(library, variables, rank, url, is_up, seed):
    faulthandler.dump_traceback_later(0.8 * LIMIT_S, file=sys.__stderr__)
    os.environ.update(variables, RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank))
    call, leave = LIBRARIES[library](rank, url)

    def bye(*_):
        try:
            leave()
        except drumline.CollectiveError:
            sys.exit(TOLD)
        sys.exit(LEFT)

    signal.signal(signal.SIGTERM, bye)
    is_up.send(True)
    late = random.Random(seed)
    while True:
        try:
            call()
        except RuntimeError as error:
            print(f"rank {rank}: {error}", file=sys.__stderr__)
            sys.exit(HEARD)
        if rank == seed % 2:  # so the other one waits in a call most of the time
            time.sleep(late.uniform(0, 0.02))


def trial(library, variables, signalled, seed):
    """Signals these ranks. Returns how long each rank lived after that, and its exit code."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as directory:
        ranks = []
        for rank in range(2):
            ours, theirs = context.Pipe(duplex=False)
            arguments = (library, variables, rank, f"file://{directory}/store", theirs, seed)
            process = context.Process(target=calls_until_sigterm, args=arguments)
            process.start()
            theirs.close()
            ranks.append((process, ours))
        for _, is_up in ranks:
            assert is_up.poll(LIMIT_S) and is_up.recv()
        time.sleep(random.Random(seed).uniform(0, 0.05))
        for rank in signalled:
            os.kill(ranks[rank][0].pid, signal.SIGTERM)
        began, took = time.monotonic(), dict[int, float]()
        alive = {process.sentinel: rank for rank, (process, _) in enumerate(ranks)}
        while alive and (left := began + LIMIT_S - time.monotonic()) > 0:
            for sentinel in multiprocessing.connection.wait(list(alive), left):
                took[alive.pop(sentinel)] = time.monotonic() - began
        for process, _ in ranks:
            process.kill()
            process.join()
    return [(took.get(rank), process.exitcode) for rank, (process, _) in enumerate(ranks)]


@needs_backends
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("library", LIBRARIES)
def test_a_program_ends_in_a_handler_of_sigterm(library, transport):
    if library == "torch":
        pytest.importorskip("torch.distributed")  # once, and not in each rank
    took = []
    for seed in range(TRIALS):
        signalled = [(0,), (0, 1), (1,), (1, 0)][seed // 2 % 4]
        for rank, (seconds, code) in enumerate(trial(library, TRANSPORTS[transport], signalled, seed)):
            what = f"trial {seed}, signalled {signalled}, rank {rank}: {code} after {seconds} s"
            assert seconds is not None, what
            # Of two that are signalled one may hear of the other before its own signal.
            right = {LEFT, TOLD} if rank in signalled else set()
            right |= {HEARD} if len(signalled) == 2 or rank not in signalled else set()
            assert code in right, what
            took.append(seconds)
    late = sum(it > 1 for it in took)
    print(f"{library} over {transport}: {TRIALS} signals, worst {max(took):.2f} s, {late} later than 1 s")
