"""Handlers of signals may call any group while the thread that they interrupt waits for one.

The long form is for `make soak`: DRUMLINE_SOAK=1.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

import numpy as np
import pytest
from ranks import run, wait_for
from torch_versions import needs_backends

import drumline
from drumline import _core

IS_LONG = os.environ.get("DRUMLINE_SOAK", "0") != "0"

# Longer than a test may take: what waits for this limit hangs.
NEVER_S = 1000.0

# Of the exceptions that an outer call raises after an abort, each says so.
ABORTED = "has aborted the group"


def sleeps(thread: int) -> bool:
    with open(f"/proc/self/task/{thread}/stat") as file:
        return file.read().rsplit(")", 1)[1].split()[0] == "S"


def handle_as_it_waits(number: signal.Signals, handler) -> threading.Thread:
    """Sends a signal to this process while its main thread sleeps in a call. ``handler`` runs there once."""
    handled, thread = threading.Event(), threading.get_native_id()

    def handle(_, frame) -> None:
        is_inside = "/drumline/" in frame.f_code.co_filename or frame.f_code.co_name == "collective"
        if is_inside and not handled.is_set():
            handled.set()
            handler()

    def send() -> None:
        while not handled.wait(0.05):
            if sleeps(thread):
                os.kill(os.getpid(), number)

    signal.signal(number, handle)
    sender = threading.Thread(target=send)
    sender.start()
    return sender


def interrupted(call, handler) -> str:
    """Makes a call, which runs ``handler`` as it waits. Returns what it raises."""
    sender = handle_as_it_waits(signal.SIGUSR1, handler)
    try:
        call()
        return "nothing"
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    finally:
        sender.join()


def error_of(call) -> str:
    try:
        call()
        return "nothing"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def meet(rank, world_size, directory, name="store", **settings):
    url = f"file://{directory}/{name}"
    return drumline.init_process_group(
        init_method=url, rank=rank, world_size=world_size, timeout=NEVER_S, **settings
    )


def waits_behind(group):
    """A call behind one in the background."""
    group.all_reduce(np.ones(3), async_op=True)
    group.barrier()


# Calls that wait for the other rank: for `interrupted`.
CALLS = {
    "all_reduce": lambda group: group.all_reduce(np.ones(3)),
    "barrier": lambda group: group.barrier(),
    "work": lambda group: group.all_reduce(np.ones(3), async_op=True).wait(),
    "behind work": waits_behind,
    "recv": lambda group: group.recv(np.ones(3), 1),
    "objects": lambda group: group.all_gather_object([None, None], 1),
    "monitored_barrier": lambda group: group.monitored_barrier(NEVER_S),
}


def leaves(group):
    group.destroy()
    sys.exit(3)


def leaves_in_a_thread(group):
    thread = threading.Thread(target=group.abort)
    thread.start()
    thread.join()
    sys.exit(3)


ENDS = {
    "destroy and exit": (leaves, "SystemExit: 3"),
    "abort and exit": (leaves_in_a_thread, "SystemExit: 3"),
    "destroy": (lambda group: group.destroy(), ABORTED),
}


def ends(rank, world_size, directory, settings, times):
    """Each call is interrupted by a handler that ends its group. Returns what each raises, by rank."""
    world = meet(rank, world_size, directory, **settings)
    outcomes = []
    cases = [(call, end) for call in CALLS for end in ENDS]
    # Of 21, the short form takes 11, others on each transport.
    cases = cases * times if times else cases[len(settings) :: 2]
    for number, (call, end) in enumerate(cases):
        group = world.new_group(name=f"g{number}", timeout=NEVER_S)
        over = f"{directory}/over-{number}"
        if rank == 0:
            raised = interrupted(lambda: CALLS[call](group), lambda: ENDS[end][0](group))
            open(over, "w").close()
        else:
            wait_for(over)
            group.isend(np.ones(3), 0)  # has no answer, and may be too late to fail
            kind, raised = "barrier" if call == "recv" else call, "nothing"
            while raised == "nothing":  # the first may have all that it needs of rank 0
                raised = error_of(lambda: CALLS[kind](group))
        outcomes.append((call, end, raised))
        world.barrier()
    world.destroy()
    return outcomes


TRANSPORTS = {"shm": {}, "sockets": {"shared_memory": False}}
if IS_LONG:
    TRANSPORTS["tcp"] = {"shared_memory": False, "unix_sockets": False}


@pytest.mark.parametrize("settings", TRANSPORTS.values(), ids=TRANSPORTS.keys())
def test_a_handler_ends_the_group_of_the_call_that_it_interrupts(settings):
    ours, theirs = run(2, ends, settings, 10 if IS_LONG else 0, limit_s=1800.0 if IS_LONG else 120.0)
    for call, end, raised in ours:
        assert ENDS[end][1] in raised, (call, end, raised)
    for call, end, raised in theirs:
        assert "rank 0" in raised, (call, end, raised)


def calls(rank, world_size, directory, settings):
    """A handler calls groups in a call. Returns the errors."""
    group = meet(rank, world_size, directory, **settings)
    other = group.new_group(name="other", timeout=NEVER_S)
    seen = {}

    def handler():
        ours, theirs = np.ones(2), np.zeros(2)
        seen["barrier"] = error_of(group.barrier)
        work = group.all_reduce(np.ones(3), async_op=True)
        seen["wait"] = error_of(work.wait)
        seen["waits a little"] = work.wait(0.01)
        seen["another group"] = error_of(lambda: other.all_reduce(ours))
        seen["sum"] = ours.tolist()
        # Messages run beside the call, also in a thread for which the handler waits.
        group.send(ours, 1)
        thread = threading.Thread(target=lambda: group.recv(theirs, 1))
        thread.start()
        thread.join()
        seen["message"] = theirs.tolist()
        seen["metrics"] = 'operation="send"} 1' in drumline.metrics_text()
        seen["subgroup"] = error_of(lambda: group.new_group(name="third").destroy())

    data = np.full(3, rank + 1.0)
    if rank == 0:
        seen["outer"] = interrupted(lambda: group.all_reduce(data), handler)
    else:
        other.all_reduce(np.ones(2))
        got = np.zeros(2)
        group.recv(got, 0)
        group.send(got + 1, 0)
        group.new_group(name="third").destroy()
        group.all_reduce(data)
        group.all_reduce(np.ones(3))  # that of the handler
    seen["result"] = data.tolist()
    group.barrier()
    other.destroy()
    group.destroy()
    return seen


@pytest.mark.parametrize("settings", [{}, {"shared_memory": False}], ids=["shm", "sockets"])
def test_a_handler_calls_groups_within_a_call(settings):
    seen, other = run(2, calls, settings)
    inside = "ValueError: {}: this thread is in all_reduce(sum) of 3 f64"
    assert seen.pop("barrier").startswith(inside.format("barrier")), seen
    assert seen.pop("wait").startswith(inside.format("wait")), seen
    assert seen == {
        "waits a little": False, "another group": "nothing", "sum": [2.0, 2.0], "message": [3.0, 3.0],
        "metrics": True, "subgroup": "nothing", "outer": "nothing", "result": [3.0, 3.0, 3.0],
    }  # fmt: skip
    assert other["result"] == [3.0, 3.0, 3.0]


def between_calls(rank, world_size, directory):
    """A handler interrupts the program, and the other rank waits in another group."""
    group = meet(rank, world_size, directory)
    other = group.new_group(name="other", timeout=NEVER_S)
    if rank == 1:
        return error_of(other.barrier)

    def handle(*_):
        group.destroy()
        sys.exit(3)

    signal.signal(signal.SIGUSR1, handle)
    with pytest.raises(SystemExit):
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(1)
    return group.is_destroyed


def test_a_handler_between_calls_leaves_a_group_in_which_nobody_comes():
    ours, theirs = run(2, between_calls)
    assert ours is True and "rank 0" in theirs, (ours, theirs)


def nested(rank, world_size, directory):
    """A handler calls another group, and a second handler interrupts that and ends the first group."""
    group = meet(rank, world_size, directory)
    other = group.new_group(name="other", timeout=NEVER_S)
    done = f"{directory}/done"
    inner = ""

    def second():
        group.destroy()
        open(done, "w").close()

    def first():
        nonlocal inner
        sender = handle_as_it_waits(signal.SIGUSR2, second)
        inner = error_of(other.barrier)
        sender.join()

    outer = ""
    if rank == 0:
        outer = interrupted(lambda: group.all_reduce(np.ones(3)), first)
    else:
        wait_for(done)
        other.barrier()
    other.destroy()
    return outer, inner


def test_a_handler_in_a_handler_ends_the_first_group():
    (outer, inner), _ = run(2, nested)
    assert ABORTED in outer and inner == "nothing", (outer, inner)


def beside(rank, world_size, directory):
    """The main thread waits for a group in which another thread is in a call, and is interrupted."""
    world = meet(rank, world_size, directory)
    outcomes = {}
    waits = {
        "collective": lambda group: group.barrier(),
        "destroy": lambda group: group.destroy(),
    }
    for name, wait in waits.items():
        group = world.new_group(name=name, timeout=NEVER_S)
        over = f"{directory}/{name}"
        if rank == 0:
            thread = threading.Thread(target=lambda group=group: error_of(group.barrier))
            thread.start()
            while not sleeps(thread.native_id):
                time.sleep(0.01)
            text = drumline.metrics_text()  # does not wait for the call
            assert f'group="{group.name}"' in text, text
            assert group.communication_time() >= 0

            def raises():
                raise KeyboardInterrupt

            outcomes[name] = interrupted(lambda group=group, wait=wait: wait(group), raises)
            group.abort()
            thread.join()
            open(over, "w").close()
        else:
            wait_for(over)
    world.destroy()
    return outcomes


def test_a_thread_that_waits_for_a_group_can_be_interrupted():
    outcomes, _ = run(2, beside)
    assert {*outcomes.values()} == {"KeyboardInterrupt: "}, outcomes


def too_long(rank, world_size, directory):
    """A handler waits for a thread that waits for the call that the handler interrupts."""
    world = meet(rank, world_size, directory)
    group = world.new_group(name="short", timeout=3)
    over, inner = f"{directory}/over", ""
    outer = ""
    if rank == 0:

        def handler():
            nonlocal inner

            def call():
                nonlocal inner
                inner = error_of(group.barrier)

            thread = threading.Thread(target=call)
            thread.start()
            thread.join()

        outer = interrupted(lambda: group.all_reduce(np.ones(3)), handler)
        open(over, "w").close()
    else:
        wait_for(over)
    world.destroy()
    return outer, inner


def test_a_thread_waits_for_a_group_no_longer_than_the_time_limit():
    (outer, inner), _ = run(2, too_long)
    assert inner.startswith("CollectiveTimeoutError"), inner
    assert "a handler interrupts all_reduce(sum) of 3 f64" in inner and "rank 0" in inner, inner
    assert "barrier" in outer, outer


class Slow:
    """A backend in Python, whose collectives wait for the other rank."""

    def __init__(self, store, rank, world_size, seconds):
        self._store, self._rank = store, rank

    def collective(self, call):
        self._store.set(f"{call.sequence}/{self._rank}", b"here")
        while not self._store.check([f"{call.sequence}/{1 - self._rank}"]):
            time.sleep(0.01)

    def abort(self):
        """Called by the handler, while `collective` goes on in Python: it ends by the handler's exception."""


def on_a_backend(rank, world_size, directory, end):
    drumline.Backend.register_backend("slow", Slow)
    group = meet(rank, world_size, directory, backend="slow")
    if rank == 1:
        wait_for(f"{directory}/over")
        group.abort()
        return ""

    def handler():
        if end == "calls":
            with pytest.raises(ValueError, match="this thread is in barrier"):
                group.barrier()
            raise RuntimeError("called")
        leaves(group)

    raised = interrupted(group.barrier, handler)
    open(f"{directory}/over", "w").close()
    return raised


@pytest.mark.parametrize("end", ["calls", "leaves"])
def test_a_handler_in_a_backend_of_the_program(end):
    for _ in range(200 if IS_LONG else 1):
        raised, _ = run(2, on_a_backend, end)
        assert {"calls": "RuntimeError: called", "leaves": "SystemExit: 3"}[end] in raised, raised


def in_a_step(rank, world_size, directory):
    """A handler interrupts the end of a step of `AsyncReduce`."""
    group = meet(rank, world_size, directory)
    reduce = _core.AsyncReduce(group._group, [("weight", 10, dict(_core.DTYPES)["f32"])])
    seen = ""

    def handler():
        nonlocal seen
        seen = error_of(reduce.counts)
        reduce.abort()

    def collective():  # the frame of a call that the core makes by itself
        reduce.synchronize()

    raised = ""
    if rank == 0:
        reduce.async_reduce("weight")
        raised = interrupted(collective, handler)
        open(f"{directory}/over", "w").close()
    else:
        wait_for(f"{directory}/over")
        raised = error_of(reduce.sync_grad)
    return raised, seen


def test_a_handler_aborts_a_step():
    (raised, seen), (theirs, _) = run(2, in_a_step)
    assert ABORTED in raised and "this thread is in a call of it" in seen, (raised, seen)
    assert "rank 0" in theirs, theirs


def of_torch(rank, world_size, directory, in_background):
    import torch
    import torch.distributed as dist

    store = dist.FileStore(f"{directory}/store", world_size)
    dist.init_process_group("drumline", store=store, rank=rank, world_size=world_size)

    def call():
        work = dist.all_reduce(torch.ones(2), async_op=in_background)
        if in_background:
            work.wait()

    def handler():
        dist.destroy_process_group()
        sys.exit(3)

    if rank == 1:
        wait_for(f"{directory}/over")
        return error_of(call)
    raised = interrupted(call, handler)
    open(f"{directory}/over", "w").close()
    return raised


@needs_backends
@pytest.mark.parametrize("in_background", [False, True])
def test_a_handler_destroys_the_groups_of_torch(in_background):
    pytest.importorskip("torch")
    import torch.distributed  # noqa: F401 (once, for all forks)

    for _ in range(100 if IS_LONG else 1):
        ours, theirs = run(2, of_torch, in_background)
        assert ours == "SystemExit: 3", ours
        assert "rank 0" in theirs and ABORTED in theirs, theirs
