"""What a forked process has of its own: threads of callbacks, and no part in the trace of its parent."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import traceback

import numpy as np
import pytest
from ranks import run

import drumline


def connect(place, rank, world_size):
    os.makedirs(place, exist_ok=True)
    drumline.init_process_group(f"file://{place}/store", rank=rank, world_size=world_size)
    return drumline._world.group_or_world(None)


def called(group):
    """Whether a callback is called that is there before the end of its call."""
    ended = threading.Event()
    works = [group.all_reduce(np.ones(1 << 16), async_op=True) for _ in range(8)]
    for work in works[:-1]:
        work._handle.then(lambda _: None)
    works[-1]._handle.then(lambda _: ended.set())
    return ended.wait(30)


def in_fork(function):
    """Runs a function in a fork of this process. Whether it has returned."""
    child = os.fork()
    if child == 0:
        signal.alarm(60)  # nobody else ends it if it hangs
        code = 1
        try:
            function()
            code = 0
        except BaseException:
            traceback.print_exc(file=sys.__stderr__)
        finally:
            os._exit(code)
    return os.waitpid(child, 0)[1] == 0


def callbacks_in_a_fork(rank, world_size, directory):
    group = connect(f"{directory}/{rank}", 0, 1)
    assert called(group)
    drumline.destroy_process_group()

    def child():
        group = connect(f"{directory}/all", rank, world_size)
        assert called(group)
        drumline.destroy_process_group()

    return in_fork(child)


def test_a_fork_calls_callbacks_on_a_thread_of_its_own():
    assert run(2, callbacks_in_a_fork) == [True] * 2


def trace_of_a_parent(rank, world_size, directory, is_over):
    os.environ["DRUMLINE_TRACE"] = f"{directory}/trace"
    group = connect(f"{directory}/parent", 0, 1)
    group.all_reduce(np.ones(3))
    if is_over:
        drumline.destroy_process_group()

    def child():
        if not is_over:
            # What the fork has inherited goes, as at the end of a block.
            drumline._world.set_world(None)
        for name in ("first", "second"):
            mine = connect(f"{directory}/{name}", 0, 1)
            mine.broadcast(np.ones(3), 0)
            drumline.destroy_process_group()
        # A trace of its own is none of its parent's.
        os.environ["DRUMLINE_TRACE"] = f"{directory}/own"
        mine = connect(f"{directory}/third", 0, 1)
        mine.broadcast(np.ones(3), 0)
        drumline.destroy_process_group()

    assert in_fork(child)
    if not is_over:
        group.all_reduce(np.ones(3))
        drumline.destroy_process_group()
    return operations(f"{directory}/trace/rank-0.json"), operations(f"{directory}/own/rank-0.json")


def operations(path):
    with open(path) as file:
        return [event["name"] for event in json.load(file) if event.get("cat") == "collective"]


def test_a_fork_leaves_the_trace_of_its_parent_alone():
    assert run(1, trace_of_a_parent, True) == [(["all_reduce"], ["broadcast"])]
    assert run(1, trace_of_a_parent, False) == [(["all_reduce"] * 2, ["broadcast"])]


def store_in_a_fork(rank, world_size, directory, kind):
    if kind == "file":
        store = drumline.FileStore(f"{directory}/store", 1)
    else:
        store = drumline.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store.set("before", b"parent")

    def child():
        for call in (lambda: store.get("before"), lambda: store.set("before", b"child")):
            with pytest.raises(drumline.StoreError, match="fork"):
                call()
        # A handle that is made here has a connection of its own.
        own = store.clone()
        assert own.get("before") == b"parent"
        own.set("after", b"child")

    assert in_fork(child)
    # No answer went to the wrong process, and no record is lost.
    return store.get("before"), store.get("after"), store.add("count", 1)


@pytest.mark.parametrize("kind", ["tcp", "file"])
def test_a_fork_gets_no_use_of_a_store_but_by_a_clone(kind):
    assert run(1, store_in_a_fork, kind) == [(b"parent", b"child", 1)]
