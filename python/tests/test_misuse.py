"""Wrong programs get an error on every rank, which names the rank and the call."""

from __future__ import annotations

import logging
import os
import signal
import threading
from datetime import timedelta

import numpy as np
import pytest
from ranks import run, run_and_see, wait_for
from torch_versions import TELLS_WHO_WAITS, needs_backends

import drumline

torch = pytest.importorskip("torch")
import torch._dynamo  # noqa: E402, F401 (DDP imports it, for seconds: once, for all forks)
import torch.distributed as dist  # noqa: E402

pytestmark = [needs_backends, pytest.mark.usefixtures("torch_base")]


def connect(rank, world_size, directory, name="store", **options):
    store = dist.FileStore(f"{directory}/{name}", world_size)
    dist.init_process_group("drumline", store=store, rank=rank, world_size=world_size, **options)


SUM, MAX = dist.ReduceOp.SUM, dist.ReduceOp.MAX


def room(count=2):
    return [torch.zeros(3) for _ in range(count)]


# The different calls of ranks 0 and 1.
DISAGREEMENTS = {
    "type": lambda r: dist.all_reduce(torch.zeros(4, dtype=[torch.float32, torch.int32][r])),
    "shape": lambda r: dist.all_reduce(torch.zeros(4 + r)),
    "operator": lambda r: dist.all_reduce(torch.zeros(4), [SUM, MAX][r]),
    "operation": lambda r: [dist.all_reduce, lambda it: dist.broadcast(it, 0)][r](torch.zeros(4)),
    "barrier": lambda r: dist.barrier() if r else dist.all_reduce(torch.zeros(4)),
    "root": lambda r: dist.reduce(torch.zeros(4), r),
    "shape of broadcast": lambda r: dist.broadcast(torch.zeros(4 + r), 0),
    "shape of all_gather": lambda r: dist.all_gather(room(), torch.zeros(3)) if r else (
        dist.all_gather([torch.zeros(5) for _ in range(2)], torch.zeros(5))),
    "type of reduce_scatter": lambda r: dist.reduce_scatter_tensor(
        torch.zeros(2, dtype=[torch.float64, torch.int64][r]),
        torch.zeros(4, dtype=[torch.float64, torch.int64][r])),
    "shape of all_to_all": lambda r: dist.all_to_all_single(
        torch.zeros(4 + r), torch.zeros(4), [2 + r, 2], [2, 2]),
    "shape of a message": lambda r: dist.send(torch.zeros(3), 1) if r == 0 else (
        dist.recv(torch.zeros(4), 0)),
    "in the background": lambda r: dist.all_reduce(torch.zeros(4 + r), async_op=True).wait(),
    "future": lambda r: dist.all_reduce(torch.zeros(4 + r), async_op=True).get_future().wait(),
}  # fmt: skip


def disagree(rank, world_size, directory):
    texts = {}
    for name, call in DISAGREEMENTS.items():
        connect(rank, world_size, directory, name)
        try:
            call(rank)
            # If the call needed no answer, the next one raises the error.
            dist.all_reduce(torch.zeros(1))
        except Exception as error:
            texts[name] = f"{type(error).__name__}: {error}"
        with pytest.raises(Exception):  # poisoned, and says so
            dist.all_reduce(torch.zeros(1))
        dist.destroy_process_group()
    return texts


def test_ranks_that_disagree_are_told_both_calls():
    for texts in run(2, disagree):
        assert set(texts) == set(DISAGREEMENTS)
        for name, text in texts.items():
            is_direct = name != "future"
            assert not is_direct or text.startswith("DistBackendError"), (name, text)
            assert "rank 0" in text and "rank 1" in text, (name, text)
            operation = "barrier" if name == "barrier" else name.split(" of ")[-1]
            if operation == "a message":
                assert "send" in text or "recv" in text, text
            elif operation in ("broadcast", "all_gather", "reduce_scatter", "all_to_all"):
                assert operation in text, (name, text)


# Calls of the other ranks after rank 1 has died.
DEATHS = {
    "all_reduce": lambda group: dist.all_reduce(torch.ones(3), group=group),
    "wait": lambda group: dist.all_reduce(torch.ones(3), group=group, async_op=True).wait(),
    "future": lambda group: dist.all_reduce(torch.ones(3), group=group, async_op=True)
    .get_future().wait(),
    "barrier": lambda group: dist.barrier(group),
    "recv": lambda group: dist.recv(torch.ones(3), 1, group=group),
    "objects": lambda group: dist.all_gather_object([None] * 3, "x", group=group),
}  # fmt: skip


def one_dies(rank, world_size, directory):
    connect(rank, world_size, directory)
    groups = {name: dist.new_group() for name in DEATHS}
    if rank == 1:
        os._exit(9)
    texts = {}
    for name, call in DEATHS.items():
        try:
            call(groups[name])
        except Exception as error:
            texts[name] = f"{type(error).__name__}: {error}"
    dist.destroy_process_group()
    return texts


def test_a_dead_rank_is_named_by_all_others():
    first, dead, third = run_and_see(3, one_dies)
    assert dead == ("exited", 9)
    for how, texts in (first, third):
        assert how == "returned", texts
        assert set(texts) == set(DEATHS)
        for name, text in texts.items():
            assert "rank 1" in text, (name, text)
            assert name == "future" or text.startswith("DistBackendError"), (name, text)


def ddp_whose_peer_dies(rank, world_size, directory):
    connect(rank, world_size, directory)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
    if rank == 1:
        os._exit(7)
    model(torch.ones(3, 4)).sum().backward()


def test_backward_names_the_rank_that_has_died():
    (how, text), dead = run_and_see(2, ddp_whose_peer_dies)
    assert dead == ("exited", 7)
    assert how == "raised" and "rank 1 has ended" in text and "all_reduce" in text, text


def ddp_whose_hook_raises(rank, world_size, directory):
    connect(rank, world_size, directory)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))

    def hook(_, bucket):
        if rank == 1:
            raise RuntimeError("the hook of rank 1 is broken")
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    model.register_comm_hook(None, hook)
    model(torch.ones(3, 4)).sum().backward()


def test_a_hook_that_raises_ends_its_rank_and_the_others_name_it():
    (how, text), (other, why) = run_and_see(2, ddp_whose_hook_raises)
    assert other == "raised" and "the hook of rank 1 is broken" in why, why
    assert how == "raised" and "rank 1" in text and "all_reduce" in text, text


def ends_after_a_mismatch(rank, world_size, directory):
    connect(rank, world_size, directory)
    if rank == 0:
        dist.broadcast(torch.zeros(4), 0)  # needs no answer
    else:
        with pytest.raises(dist.DistBackendError):
            dist.all_reduce(torch.zeros(4))
    dist.destroy_process_group()


def test_the_end_of_a_group_tells_of_a_mismatch_that_no_call_has_told():
    (how, text), (other, why) = run_and_see(2, ends_after_a_mismatch)
    assert how == "raised" and "rank 1" in text and "all_reduce" in text, (how, text)
    assert other == "returned", why


def too_late(rank, world_size, directory):
    connect(rank, world_size, directory, timeout=timedelta(seconds=5))
    if rank == 1:
        wait_for(f"{directory}/over")
        dist.all_reduce(torch.ones(2))  # has what it needs of rank 0
    try:
        dist.all_reduce(torch.ones(2))
    finally:
        open(f"{directory}/over", "w").close()


def test_a_rank_that_comes_too_late_is_named():
    for rank, (how, text) in enumerate(run_and_see(2, too_late)):
        assert how == "raised" and "torch.distributed.DistBackendError" in text, (how, text)
        assert "rank 1" in text, (rank, text)


def waits_with_a_limit(rank, world_size, directory):
    connect(rank, world_size, directory)
    if rank == 1:
        dist.recv(torch.zeros(1), 0)
        tensor = torch.ones(2)
        dist.all_reduce(tensor)
        return tensor.tolist()
    tensor = torch.ones(2)
    work = dist.all_reduce(tensor, async_op=True)
    with pytest.raises(dist.DistBackendError, match="0.1 s of wait"):
        work.wait(timedelta(seconds=0.1))
    dist.send(torch.ones(1), 1)
    work.wait()
    return tensor.tolist()


def test_a_wait_may_end_before_its_operation_which_goes_on():
    assert run(2, waits_with_a_limit) == [[2, 2]] * 2


def after_destroy(rank, world_size, directory):
    connect(rank, world_size, directory)
    group = dist.group.WORLD
    work = dist.all_reduce(torch.ones(1), async_op=True)
    work.wait()
    dist.destroy_process_group()
    work.wait()  # what has ended, has ended
    with pytest.raises(ValueError):
        dist.all_reduce(torch.ones(1))
    with pytest.raises(Exception, match="destroyed"):
        group.allreduce([torch.ones(1)]).wait()
    with pytest.raises((ValueError, AssertionError)):
        dist.destroy_process_group()
    own = drumline.init_process_group(f"file://{directory}/own", rank=rank, world_size=world_size)
    drumline.destroy_process_group()
    for call in (
        lambda: drumline.all_reduce(np.ones(1)), drumline.destroy_process_group,
        lambda: own.all_reduce(np.ones(1)), lambda: own.new_group([0]), lambda: own.rank,
    ):  # fmt: skip
        with pytest.raises(ValueError, match="destroyed"):
            call()


def test_use_after_destroy_is_an_error():
    run(2, after_destroy)


def leaves(rank, world_size, directory, how):
    connect(rank, world_size, directory)
    dist.all_reduce(torch.ones(2))
    if rank == 1:
        if how == "destroys":
            dist.destroy_process_group()
        return
    dist.all_reduce(torch.ones(2))


@pytest.mark.parametrize("how", ["returns", "destroys"])
def test_a_rank_that_goes_while_others_work_is_named(how):
    (what, text), (other, _) = run_and_see(2, leaves, how)
    assert what == "raised" and "rank 1" in text and "all_reduce" in text, text
    assert other == "returned"


def interrupted(rank, world_size, directory, in_background):
    connect(rank, world_size, directory)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if rank == 0:
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        try:
            if in_background:
                dist.all_reduce(torch.ones(2), async_op=True).wait()
            else:
                dist.all_reduce(torch.ones(2))
        finally:
            open(f"{directory}/over", "w").close()
    wait_for(f"{directory}/over")
    dist.all_reduce(torch.ones(2))  # has what it needs of rank 0
    dist.all_reduce(torch.ones(2))


def test_control_c_gets_through_and_the_others_hear_of_it():
    (how, text), (other, why) = run_and_see(2, interrupted, False)
    assert how == "raised" and text.startswith("builtins.KeyboardInterrupt"), (how, text)
    assert other == "raised" and "rank 0" in why, (other, why)
    assert "abort" in why or not TELLS_WHO_WAITS, why


def test_control_c_gets_through_while_a_work_is_waited_for():
    (how, text), _ = run_and_see(2, interrupted, True)
    assert how == "raised" and text.startswith("builtins.KeyboardInterrupt"), (how, text)


def leave_after_a_failure(rank, world_size, directory):
    connect(rank, world_size, directory)
    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("drumline.torch").addHandler(handler)
    counts = []
    for group, looks in ((dist.new_group(), True), (dist.new_group(), False)):
        work = dist.all_reduce(torch.zeros(4 + rank), group=group, async_op=True)
        if looks:
            with pytest.raises(RuntimeError, match="ranks disagree"):
                work.wait()
        dist.destroy_process_group(group)
        counts.append(sum("left a group that had failed" in it for it in records))
    return counts


def test_a_failure_that_the_program_has_seen_is_not_told_again_at_the_end():
    for counts in run(2, leave_after_a_failure):
        assert counts == [0, 1], counts
