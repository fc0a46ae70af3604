"""drumline as a backend of torch.distributed."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from datetime import timedelta

import pytest
from ranks import run, run_and_see

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402


def connect(rank, world_size, directory, name="drumline", **options):
    store = dist.FileStore(f"{directory}/store", world_size)
    dist.init_process_group(name, store=store, rank=rank, world_size=world_size, **options)


def beyond_gloo(rank, world_size, directory):
    connect(rank, world_size, directory)
    out = {}
    names = "int16 uint16 uint32 uint64 float8_e4m3fn float8_e5m2 bfloat16 float16 int64 bool"
    for name in names.split():
        tensor = torch.ones(6).to(getattr(torch, name))
        dist.all_reduce(tensor)
        out[name] = tensor.float().tolist()
    tensor = torch.tensor([rank * 10, 3])
    dist.all_reduce(tensor, dist.ReduceOp.AVG)
    out["integer avg"] = tensor.tolist()
    tensor = torch.ones(2) * (rank + 1)
    dist.all_reduce(tensor, dist._make_nccl_premul_sum(2.0))
    out["premul_sum"] = tensor.tolist()
    parts = [torch.zeros(n + 1) for n in range(world_size)]
    dist.all_gather(parts, torch.full((rank + 1,), float(rank)))
    out["uneven all_gather"] = [part.tolist() for part in parts]
    tensor = torch.ones(3) * (rank + 1)
    dist.reduce(tensor, 0)
    out["reduce"] = tensor.tolist()
    tensor = torch.complex(torch.ones(2), torch.ones(2) * rank)
    dist.all_reduce(tensor)
    out["complex"] = tensor.tolist()
    dist.destroy_process_group()
    return out


def test_types_and_operators_that_gloo_lacks():
    for rank, out in enumerate(run(2, beyond_gloo)):
        assert all(out[name] == [2] * 6 for name in list(out)[:9])
        assert out["bool"] == [1] * 6
        assert out["integer avg"] == [5, 3]
        assert out["premul_sum"] == [6, 6]
        assert out["uneven all_gather"] == [[0], [1, 1]]
        assert out["reduce"] == ([3, 3, 3] if rank == 0 else [2, 2, 2])
        assert out["complex"] == [2 + 1j, 2 + 1j]


def layouts(rank, world_size, directory):
    connect(rank, world_size, directory)
    grid = torch.arange(12.0).reshape(3, 4)
    dist.all_reduce(grid[:, 1])  # a column
    dist.all_reduce(grid.t()[2:])  # transposed
    work = dist.all_reduce(grid[::2, 0], async_op=True)
    work.wait()
    future = dist.all_reduce(grid[1, ::3], async_op=True).get_future()
    [result] = future.wait()
    outs = [torch.zeros(2, 2).t() for _ in range(world_size)]
    dist.all_gather(outs, (torch.arange(4.0).reshape(2, 2) + rank).t())
    whole = torch.zeros(world_size, 3)
    whole[rank] = rank + 1.0
    dist.all_gather_into_tensor(whole, whole[rank])  # in place
    empty = torch.zeros(0)
    dist.all_reduce(empty)
    leaf = torch.ones(2, 2, requires_grad=True)
    with torch.no_grad():
        dist.broadcast(leaf.t()[:, :1], 1)
    dist.destroy_process_group()
    return grid.tolist(), result.tolist(), [out.tolist() for out in outs], whole.tolist()


def test_tensors_of_any_layout_are_right():
    for grid, result, outs, whole in run(2, layouts):
        expected = torch.arange(12.0).reshape(3, 4)
        expected[:, 1:] *= 2
        expected[::2, 0] *= 2
        expected[1, ::3] *= 2
        assert grid == expected.tolist()
        assert result == expected[1, ::3].tolist()
        assert outs == [[[rank, rank + 2.0], [rank + 1.0, rank + 3.0]] for rank in range(2)]
        assert whole == [[1] * 3, [2] * 3]


def works(rank, world_size, directory):
    connect(rank, world_size, directory)
    work = dist.all_reduce(torch.ones(4), async_op=True)
    while not work.is_completed():
        time.sleep(0.001)
    success, result = work.is_success(), work.result()[0].tolist()
    future = dist.all_reduce(torch.ones(4), async_op=True).get_future()
    doubled = future.then(lambda it: it.value()[0] * 2).wait().tolist()
    # Neither the tensor nor the work is kept, and the operation goes on.
    for _ in range(20):
        dist.all_reduce(torch.ones(100_000), async_op=True)
    gc.collect()
    other = torch.zeros(1)
    source = -1
    if rank == 0:
        source = dist.recv(other)
    else:
        dist.send(torch.ones(1), 0)
    dist.barrier()
    dist.destroy_process_group()
    return success, result, doubled, source


def test_works_and_futures_tell_what_they_know():
    for rank, (success, result, doubled, source) in enumerate(run(2, works)):
        assert success and result == [2] * 4 and doubled == [4] * 4
        assert source == (1 if rank == 0 else -1)


def groups(rank, world_size, directory):
    connect(rank, world_size, directory)
    seen = []
    pair = dist.new_group([0, 2])
    if rank in (0, 2):
        tensor = torch.tensor([rank + 1.0])
        dist.all_reduce(tensor, group=pair)
        seen.append(tensor.item())
    halves = dist.split_group(split_ranks=[[0, 1], [2]])
    tensor = torch.tensor([rank + 1.0])
    dist.all_reduce(tensor, group=halves)
    seen.append(tensor.item())
    dist.monitored_barrier(timeout=timedelta(seconds=60))
    objects = [None] * world_size
    dist.all_gather_object(objects, {"rank": rank})
    seen.append(objects)
    several = [torch.full((n,), rank + 1.0) for n in range(3)]
    with dist._coalescing_manager():
        for tensor in several:
            dist.all_reduce(tensor)
    seen.append([tensor.tolist() for tensor in several])
    after, before = (rank + 1) % world_size, (rank - 1) % world_size
    got = torch.zeros(1)
    batch = [
        dist.P2POp(dist.isend, torch.tensor([float(rank)]), after),
        dist.P2POp(dist.irecv, got, before),
    ]
    for request in dist.batch_isend_irecv(batch):
        request.wait()
    seen.append(got.item())
    dist.destroy_process_group()
    # And once more.
    store = dist.FileStore(f"{directory}/again", world_size)
    dist.init_process_group("drumline", store=store, rank=rank, world_size=world_size)
    dist.barrier()
    dist.destroy_process_group()
    return seen


@pytest.mark.parametrize("level", ["OFF", "DETAIL"])
def test_groups_of_some_ranks(level, monkeypatch):
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", level)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    for rank, seen in enumerate(run(3, groups)):
        if rank != 1:
            assert seen.pop(0) == 4.0
        half = [3.0, 3.0, 3.0][rank]
        assert seen == [half, [{"rank": r} for r in range(3)], [[], [6], [6, 6]], (rank - 1) % 3]


def disagree(rank, world_size, directory, what):
    connect(rank, world_size, directory)
    if what == "type":
        dist.all_reduce(torch.zeros(4, dtype=[torch.float32, torch.int32][rank]))
    elif what == "shape":
        dist.all_reduce(torch.zeros(4 + rank))
    elif what == "operator":
        dist.all_reduce(torch.zeros(4), [dist.ReduceOp.SUM, dist.ReduceOp.MAX][rank])
    elif what == "operation":
        dist.all_reduce(torch.zeros(4)) if rank else dist.broadcast(torch.zeros(4), 0)
    elif what == "work":
        dist.all_reduce(torch.zeros(4 + rank), async_op=True).wait()
    elif what == "future":
        dist.all_reduce(torch.zeros(4 + rank), async_op=True).get_future().wait()
    dist.destroy_process_group()


@pytest.mark.parametrize("what", ["type", "shape", "operator", "operation", "work", "future"])
def test_ranks_that_disagree_are_told_both_calls(what):
    for rank, (how, text) in enumerate(run_and_see(2, disagree, what)):
        assert how == "raised", (rank, how, text)
        if what != "future":
            assert text.startswith("torch.distributed.DistBackendError"), text
        assert "rank 0" in text and "rank 1" in text and "all_reduce" in text, text


def ddp_with_other_models(rank, world_size, directory):
    connect(rank, world_size, directory)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
    if rank == 1:
        os._exit(7)
    model(torch.ones(3, 4)).sum().backward()


def test_backward_names_the_rank_that_has_died():
    (how, text), dead = run_and_see(2, ddp_with_other_models)
    assert dead == ("exited", 7)
    assert how == "raised" and "rank 1 has ended" in text and "all_reduce" in text, text


def too_late(rank, world_size, directory):
    connect(rank, world_size, directory, timeout=timedelta(seconds=1))
    if rank == 1:
        time.sleep(4)
        dist.all_reduce(torch.ones(2))  # has what it needs of rank 0
    dist.all_reduce(torch.ones(2))


def test_a_rank_that_comes_too_late_is_named():
    for rank, (how, text) in enumerate(run_and_see(2, too_late)):
        assert how == "raised" and "torch.distributed.DistBackendError" in text, (how, text)
        assert "rank 1" in text, (rank, text)


def after_destroy(rank, world_size, directory):
    connect(rank, world_size, directory)
    group = dist.group.WORLD
    dist.destroy_process_group()
    with pytest.raises(ValueError):
        dist.all_reduce(torch.ones(1))
    with pytest.raises(Exception, match="destroyed"):
        group.allreduce([torch.ones(1)]).wait()


def test_use_after_destroy_is_an_error():
    run(2, after_destroy)


def interrupted(rank, world_size, directory, in_background):
    connect(rank, world_size, directory)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if rank == 0:
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        if in_background:
            dist.all_reduce(torch.ones(2), async_op=True).wait()
        else:
            dist.all_reduce(torch.ones(2))
    time.sleep(1.5)
    dist.all_reduce(torch.ones(2))  # has what it needs of rank 0
    dist.all_reduce(torch.ones(2))


def test_control_c_gets_through_and_the_others_hear_of_it():
    (how, text), (other, why) = run_and_see(2, interrupted, False)
    assert how == "raised" and text.startswith("builtins.KeyboardInterrupt"), (how, text)
    assert other == "raised" and "rank 0" in why and "abort" in why, (other, why)


def test_control_c_gets_through_while_a_work_is_waited_for():
    (how, text), _ = run_and_see(2, interrupted, True)
    assert how == "raised" and text.startswith("builtins.KeyboardInterrupt"), (how, text)


def forked(rank, world_size, directory):
    connect(rank, world_size, directory)
    child = os.fork()
    if child == 0:
        try:
            dist.all_reduce(torch.ones(1))
        except Exception as error:
            os._exit(0 if "fork" in str(error) else 1)
        os._exit(2)
    _, status = os.waitpid(child, 0)
    tensor = torch.ones(1)
    dist.all_reduce(tensor)  # the group is whole
    dist.destroy_process_group()
    return status, tensor.item()


def test_a_forked_process_cannot_disturb_the_group_of_its_parent():
    assert run(2, forked) == [(0, 2.0)] * 2


def instead_of_gloo(rank, world_size, directory):
    from drumline.torch.register import autoload

    autoload()
    connect(rank, world_size, directory, name="gloo")
    tensor = torch.ones(2, dtype=torch.int16)  # gloo cannot
    dist.all_reduce(tensor)
    dist.destroy_process_group()
    return tensor.tolist()


def test_drumline_takes_the_place_of_gloo(monkeypatch):
    monkeypatch.setenv("DRUMLINE_REPLACE_GLOO", "1")
    assert run(2, instead_of_gloo) == [[2, 2]] * 2


def cycles(rank, world_size, directory):
    def counts():
        threads = len(os.listdir("/proc/self/task"))
        return threads, len(os.listdir("/proc/self/fd"))

    before = None
    for cycle in range(12):
        store = dist.FileStore(f"{directory}/store{cycle}", world_size)
        dist.init_process_group("drumline", store=store, rank=rank, world_size=world_size)
        tensor = torch.ones(10)
        dist.all_reduce(tensor)
        dist.all_reduce(tensor, async_op=True).wait()
        dist.destroy_process_group()
        if cycle == 3:
            gc.collect()
            before = counts()
    gc.collect()
    return before, counts()


def test_groups_leave_nothing_behind():
    for before, after in run(2, cycles):
        assert before == after


def waits_in_a_callback(rank, world_size, directory):
    connect(rank, world_size, directory)

    def again(future):
        [tensor] = future.value()
        return dist.all_reduce(tensor, async_op=True).get_future().then(lambda it: it.value()).wait()

    future = dist.all_reduce(torch.ones(2), async_op=True).get_future()
    result = future.then(again).wait()[0].tolist()
    dist.destroy_process_group()
    return result


def test_a_callback_may_wait_for_another_operation():
    assert run(2, waits_in_a_callback) == [[4, 4]] * 2
