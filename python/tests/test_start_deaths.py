"""Ranks that are killed while the others start up and make groups, with the variables that torchrun sets.

The long form is for `make soak`: DRUMLINE_SOAK=1.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import random
import signal
import sys
import time
from datetime import timedelta

import numpy as np

import drumline

IS_LONG = os.environ.get("DRUMLINE_SOAK", "0") != "0"
KILLS = 300 if IS_LONG else 12

WORLD = 4

# To tell a hang from a slow machine. The time limit of start-up is longer.
LIMIT_S = 60.0
NEVER_S = 1000.0

WAYS = [{}, {"DRUMLINE_SHARED_MEMORY": "0"}, {"DRUMLINE_SHARED_MEMORY": "0", "DRUMLINE_UNIX_SOCKETS": "0"}]


def starts_up_again_and_again(rank, variables, told):
    """Until a call fails. Tells which rank is blamed, when, and the error."""
    faulthandler.dump_traceback_later(0.8 * LIMIT_S, file=sys.__stderr__)
    os.environ.update(variables, RANK=str(rank), LOCAL_RANK=str(rank))
    pairs = [rank // 2 * 2, rank // 2 * 2 + 1]
    try:
        while True:
            world = drumline.init_process_group(timeout=NEVER_S)
            for ranks in (None, pairs):
                group = world.new_group(ranks)
                group.all_reduce(np.ones(10))
                group.destroy()
            world.barrier()
            drumline.destroy_process_group()
    except drumline.DrumlineError as error:
        told.send((error.culprit, time.monotonic(), f"{type(error).__name__}: {error}"))
    time.sleep(NEVER_S)  # its process outlives its failure


def kill(store, number):
    """Kills a rank once it has said in the store that it is there. Returns what the others say, and how long they took."""
    chance = random.Random(number)
    victim = chance.randrange(WORLD)
    variables = WAYS[number % len(WAYS)] | {
        "WORLD_SIZE": str(WORLD),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": str(number),
    }
    context = multiprocessing.get_context("fork")
    ranks = []
    for rank in range(WORLD):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=starts_up_again_and_again, args=(rank, variables, theirs))
        process.start()
        theirs.close()
        ranks.append((process, ours))
    try:
        store.wait([f"start/{number}/drumline/world/process/{victim}"], timedelta(seconds=LIMIT_S))
        # As long as three rounds take, about.
        time.sleep(chance.uniform(0, 0.2))
        os.kill(ranks[victim][0].pid, signal.SIGKILL)
        killed, outcomes = time.monotonic(), []
        for rank, (_, told) in enumerate(ranks):
            if rank != victim:
                left = max(0.0, killed + LIMIT_S - time.monotonic())
                culprit, at, text = told.recv() if told.poll(left) else (None, killed + LIMIT_S, "nothing")
                outcomes.append((culprit == victim, at - killed, f"{number}, victim {victim}: rank {rank} says {text}"))
        return outcomes
    finally:
        for process, _ in ranks:
            process.kill()
            process.join()


def test_a_rank_that_is_killed_amid_start_up_is_named_by_all():
    store = drumline.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    outcomes = [it for number in range(KILLS) for it in kill(store, number)]
    took = sorted(seconds for _, seconds, _ in outcomes)
    late = sum(it > 1 for it in took)
    print(f"{KILLS} kills: median {took[len(took) // 2]:.3f} s, worst {took[-1]:.2f} s, {late} later than 1 s")
    wrong = [text for is_right, _, text in outcomes if not is_right]
    assert not wrong, "\n".join(wrong)
