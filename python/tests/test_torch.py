"""drumline as a backend of torch.distributed."""

from __future__ import annotations

import gc
import os
import re
import signal
import time
import weakref
from datetime import timedelta

import numpy as np
import pytest
from ranks import run, run_and_see, wait_for
from torch_versions import EVENTS_ARE_ASYNC, VERSION, needs_backends, needs_monitored_barrier, needs_split, since

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402

pytestmark = [needs_backends, pytest.mark.usefixtures("torch_base")]


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
    moved = {}
    for name in [*names.split(), "float8_e4m3fnuz", *["float8_e8m0fnu"] * (VERSION >= (2, 7))]:
        kind = getattr(torch, name)
        tensor = torch.full((3,), rank + 1.0).to(kind)
        dist.broadcast(tensor, 1)
        parts = [torch.ones(1).to(kind) for _ in range(world_size)]
        dist.all_gather(parts, torch.full((1,), 2.0 * (rank + 1)).to(kind))
        other = torch.ones(2).to(kind)
        dist.send(tensor[:2], 1) if rank == 0 else dist.recv(other, 0)
        moved[name] = [it.float().tolist() for it in (tensor, *parts, *([other] if rank else []))]
    out["moved"] = moved
    parts = [torch.zeros(n + 1) for n in range(world_size)]
    dist.all_gather(parts, torch.full((rank + 1,), float(rank)))
    out["uneven all_gather"] = [part.tolist() for part in parts]
    own = torch.zeros(rank + 1)
    dist.reduce_scatter(own, [torch.full((n + 1,), n + 1.0) for n in range(world_size)])
    out["uneven reduce_scatter"] = own.tolist()
    parts = [torch.zeros(n + rank) for n in range(world_size)]
    dist.all_to_all(parts, [torch.full((n + rank,), 10.0 * rank + n) for n in range(world_size)])
    out["uneven all_to_all"] = [part.tolist() for part in parts]
    own = torch.zeros(2 * rank + 1, 2)  # rank 0 gets a row of rank 1, rank 1 gets 2 and 1
    dist.all_to_all_single(
        own, torch.full((2, 2), rank + 1.0),
        [[0, 1], [2, 1]][rank], [[0, 2], [1, 1]][rank],
    )
    out["uneven all_to_all_single"] = own.tolist()
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
        assert all(out[name] == [2] * 6 for name in list(out)[:9]), out
        assert out["bool"] == [1] * 6
        assert out["integer avg"] == [5, 3]
        assert out["premul_sum"] == [6, 6]
        for name, (broadcast, *parts) in out["moved"].items():
            expected = [2] * 3 if name != "bool" else [1] * 3
            assert broadcast == expected, (name, broadcast)
            assert parts[:2] == ([[2], [4]] if name != "bool" else [[1], [1]]), (name, parts)
            assert parts[2:] == ([expected[:2]] if rank else []), (name, parts)
        assert out["uneven all_gather"] == [[0], [1, 1]]
        assert out["uneven reduce_scatter"] == [2.0 * (rank + 1)] * (rank + 1)
        assert out["uneven all_to_all"] == [[10.0 * at + rank] * (at + rank) for at in range(2)]
        expected = [[[2, 2]], [[1, 1], [1, 1], [2, 2]]][rank]
        assert out["uneven all_to_all_single"] == expected
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
    unaligned = torch.ones(5)
    dist.all_reduce(unaligned[1:])
    dist.destroy_process_group()
    assert unaligned.tolist() == [1, 2, 2, 2, 2]
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


def waits(rank, world_size, directory):
    connect(rank, world_size, directory)
    ended, going_on = dist.AllreduceOptions(), dist.AllreduceOptions()
    ended.asyncOp = False
    tensor, strided = torch.ones(2), torch.ones(4)
    works = [dist.group.WORLD.allreduce([it], ended) for it in (tensor, strided[::2])]
    assert tensor.tolist() == [2, 2] and strided.tolist() == [2, 1, 2, 1]
    works.append(dist.group.WORLD.allreduce([tensor], going_on))
    assert works[-1].wait() and tensor.tolist() == [4, 4]
    dist.destroy_process_group()
    return [work is None for work in works]


@since(2, 8, what="calls that end before they return")
def test_a_call_for_which_torch_waits_makes_no_work():
    assert run(2, waits) == [[True, True, False]] * 2


def groups(rank, world_size, directory):
    connect(rank, world_size, directory)
    seen = []
    pair = dist.new_group([0, 2])
    if rank in (0, 2):
        tensor = torch.tensor([rank + 1.0])
        dist.all_reduce(tensor, group=pair)
        seen.append(tensor.item())
    if VERSION >= (2, 14):
        dist.monitored_barrier(timeout=timedelta(seconds=60))
    objects = [None] * world_size
    dist.all_gather_object(objects, {"rank": rank})
    seen.append(objects)
    several = [torch.full((n,), rank + 1.0) for n in range(3)]
    with dist._coalescing_manager():
        for tensor in several:
            dist.all_reduce(tensor)
    seen.append([tensor.tolist() for tensor in several])
    gathered = [torch.zeros(3), torch.zeros(6)]
    with dist._coalescing_manager():
        for n, tensor in enumerate(gathered):
            dist.all_gather_into_tensor(tensor, torch.full((n + 1,), float(rank)))
    seen.append([tensor.tolist() for tensor in gathered])
    scattered = [torch.zeros(1), torch.zeros(2)]
    with dist._coalescing_manager():
        for n, tensor in enumerate(scattered):
            dist.reduce_scatter_tensor(tensor, torch.arange(3.0 * (n + 1)))
    seen.append([tensor.tolist() for tensor in scattered])
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
        assert seen == [
            [{"rank": r} for r in range(3)],
            [[], [6], [6, 6]],
            [[0, 1, 2], [0, 0, 1, 1, 2, 2]],
            [[3 * rank], [6 * rank, 6 * rank + 3]],
            (rank - 1) % 3,
        ]


def halves(rank, world_size, directory):
    connect(rank, world_size, directory)
    half = dist.split_group(split_ranks=[[0, 1], [2]])
    tensor = torch.tensor([rank + 1.0])
    dist.all_reduce(tensor, group=half)
    dist.destroy_process_group()
    return tensor.item()


@needs_split
@pytest.mark.parametrize("level", ["OFF", "DETAIL"])
def test_groups_may_be_split(level, monkeypatch):
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", level)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert run(3, halves) == [3.0] * 3


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


def comes_late(rank, world_size, directory):
    """Over torch's TCPStore. Returns what the process wrote to its stderr."""
    os.dup2(os.open(f"{directory}/stderr-{rank}", os.O_CREAT | os.O_WRONLY), 2)
    port = f"{directory}/port"
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        with open(f"{port}.new", "w") as file:
            file.write(str(store.port))
        os.rename(f"{port}.new", port)
    else:
        wait_for(port)
        store = dist.TCPStore("127.0.0.1", int(open(port).read()))
        time.sleep(0.6)
    dist.init_process_group("drumline", store=store, rank=rank, world_size=world_size)
    if rank == 1:
        time.sleep(0.6)
    dist.monitored_barrier()
    dist.destroy_process_group()
    return open(f"{directory}/stderr-{rank}").read()


@needs_monitored_barrier
def test_who_waits_for_a_late_rank_over_the_store_of_torch_logs_nothing():
    for text in run(2, comes_late):
        assert "waitForInput" not in text, text


def someone_misses_a_barrier(rank, world_size, directory):
    connect(rank, world_size, directory)
    text = ""
    if rank != 1:
        try:
            dist.monitored_barrier(timeout=timedelta(seconds=0.3), wait_all_ranks=True)
        except RuntimeError as error:
            text = str(error)
    tensor = torch.ones(1)
    dist.all_reduce(tensor)  # the group goes on
    dist.destroy_process_group()
    return text, tensor.item()


def many_monitored_barriers(rank, world_size, directory):
    store = dist.FileStore(f"{directory}/store", world_size)
    dist.init_process_group("drumline", store=store, rank=rank, world_size=world_size)
    counts = []
    for _ in range(3):
        dist.monitored_barrier()
        dist.barrier()
        counts.append(store.num_keys())
        dist.barrier()
    dist.destroy_process_group()
    return counts


@needs_monitored_barrier
def test_monitored_barriers_leave_nothing_in_the_store():
    for counts in run(3, many_monitored_barriers):
        assert counts == counts[:1] * 3, counts


@needs_monitored_barrier
def test_a_monitored_barrier_names_who_is_missing_and_the_group_goes_on():
    (first, _), (_, _), (third, _) = outcomes = run(3, someone_misses_a_barrier)
    assert [total for _, total in outcomes] == [3] * 3
    assert "Rank 1 failed to pass" in first, first
    assert "rank 0" in third and "Rank 1 failed to pass" in third, third


def the_first_misses_a_barrier(rank, world_size, directory):
    connect(rank, world_size, directory)
    text = ""
    if rank != 0:
        try:
            dist.monitored_barrier(timeout=timedelta(seconds=0.3), wait_all_ranks=True)
        except RuntimeError as error:
            text = str(error)
    dist.all_reduce(torch.ones(1))
    dist.destroy_process_group()
    return text


@needs_monitored_barrier
def test_a_monitored_barrier_without_rank_0_names_it():
    _, *others = run(3, the_first_misses_a_barrier)
    for text in others:
        assert "Rank 0 failed to pass" in text, text


def monitored_without(rank, world_size, directory, gone, how):
    """A rank goes while another waits in a barrier that never ends by itself."""
    connect(rank, world_size, directory)
    dist.barrier()
    if rank != gone:
        with pytest.raises(RuntimeError) as error:
            dist.monitored_barrier(timeout=timedelta(days=1))
        return str(error.value)
    if how == "ends":
        os._exit(3)
    dist.destroy_process_group()
    return ""


@needs_monitored_barrier
@pytest.mark.parametrize(("gone", "how"), [(0, "leaves"), (0, "ends"), (1, "ends"), (1, "leaves")])
def test_a_monitored_barrier_ends_when_a_rank_has_gone(gone, how):
    outcomes = run_and_see(2, monitored_without, gone, how)
    assert outcomes[1 - gone][0] == "returned", outcomes
    told = {"ends": f"the process of rank {gone} has ended", "leaves": f"rank {gone} has closed"}
    assert told[how] in outcomes[1 - gone][1], outcomes


def barriers_of_different_patience(rank, world_size, directory):
    """Rank 2 gives up first; nobody tells it of rank 1."""
    connect(rank, world_size, directory)
    text = ""
    if rank != 1:
        limit = timedelta(seconds=2 if rank == 0 else 0.2)
        try:
            dist.monitored_barrier(timeout=limit)
        except RuntimeError as error:
            text = str(error)
    dist.barrier()
    dist.destroy_process_group()
    return text


@needs_monitored_barrier
def test_a_rank_whose_time_is_over_first_looks_who_is_missing():
    first, _, third = run(3, barriers_of_different_patience)
    for text in (first, third):
        assert "Rank 1 failed to pass" in text, text


def profiled(rank, world_size, directory):
    connect(rank, world_size, directory)
    with torch.autograd.profiler.profile(record_shapes=True, use_kineto=False) as profiler:
        dist.all_reduce(torch.ones(2, 3))
        dist.broadcast(torch.ones(4), 0, async_op=True).wait()
        dist.all_gather_into_tensor(torch.ones(10), torch.ones(5))
    dist.destroy_process_group()
    return {
        event.name: (event.input_shapes, event.is_async)
        for event in profiler.function_events
        if event.name.startswith("drumline:")
    }


def test_the_profiler_sees_operations_with_their_sizes():
    for events in run(2, profiled):
        assert events == {
            "drumline:all_reduce": ([[2, 3]], EVENTS_ARE_ASYNC),
            "drumline:broadcast": ([[4]], EVENTS_ARE_ASYNC),
            "drumline:_all_gather_base": ([[5]], EVENTS_ARE_ASYNC),
        }


def one_backend_for_each_device(rank, world_size, directory):
    connect(rank, world_size, directory, name="cpu:drumline,cuda:gloo")
    tensor = torch.ones(2, dtype=torch.int16)  # gloo cannot
    dist.all_reduce(tensor)
    config = dist.get_backend_config()
    dist.destroy_process_group()
    return tensor.tolist(), str(config)


def test_devices_may_have_different_backends(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    for tensor, config in run(2, one_backend_for_each_device):
        assert tensor == [2, 2] and config == "cpu:drumline,cuda:gloo"


def another_backend_for_cpus(rank, world_size, directory):
    """drumline has the other device, so all tensors here are gloo's."""
    connect(rank, world_size, directory, name="cpu:gloo,cuda:drumline")
    pair = dist.new_group([0, 1], backend="cpu:gloo,cuda:drumline")
    tensors = [torch.ones(2) * (rank + 1) for _ in range(2)]
    for tensor, group in zip(tensors, (None, pair), strict=True):
        dist.all_reduce(tensor, group=group)
    work = dist.all_reduce(tensors[0], async_op=True)
    work.wait()
    with pytest.raises((RuntimeError, ValueError)):
        dist.all_reduce(torch.ones(2, dtype=torch.int16))
    objects = [None] * world_size
    dist.all_gather_object(objects, rank)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
    model(torch.ones(1, 1) * rank).sum().backward()
    dist.barrier()
    dist.destroy_process_group()
    return [tensor.tolist() for tensor in tensors], objects, model.module.weight.grad.item()


def test_tensors_of_another_device_go_to_its_backend(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert run(2, another_backend_for_cpus) == [([[6, 6], [3, 3]], [0, 1], 0.5)] * 2


def short_forms(rank, world_size, directory):
    """Methods of torch's groups, as programs call them without `torch.distributed`."""
    connect(rank, world_size, directory)
    group, mine = dist.group.WORLD, torch.ones(2) * (rank + 1)
    out = {}
    for name, call in {
        "allreduce": lambda it: group.allreduce(it),
        "allreduce of a list": lambda it: group.allreduce([it], dist.ReduceOp.MAX),
        "allreduce by name": lambda it: group.allreduce(it, op=dist.ReduceOp.MIN),
        "broadcast": lambda it: group.broadcast(it, 1),
        "broadcast by name": lambda it: group.broadcast(it, root=0),
        "options": lambda it: group.allreduce([it], opts=dist.AllreduceOptions()),
    }.items():
        data = mine.clone()
        call(data).wait()
        out[name] = data.tolist()
    parts = [torch.zeros(2) for _ in range(world_size)]
    group.allgather(parts, mine).wait()
    out["allgather"] = [part.tolist() for part in parts]
    own = torch.zeros(2)
    group.reduce_scatter(own, [mine] * world_size).wait()
    out["reduce_scatter"] = own.tolist()
    group.scatter(own, [mine, 2 * mine] if rank == 1 else [], root=1).wait()
    out["scatter"] = own.tolist()
    group.barrier().wait()
    group.monitored_barrier(timedelta(seconds=60))
    out["about"] = group.rank(), group.size(), group.name(), dist.get_world_size(group), group.group_name != ""
    dist.destroy_process_group()
    return out


def test_groups_have_the_methods_of_torchs_class():
    for rank, out in enumerate(run(2, short_forms)):
        # From 2.14 on the name in C++ is "custom" where the process group is torch's own.
        who, size, name, same, has_name = out.pop("about")
        assert (who, size, same, has_name) == (rank, 2, 2, True) and name in ("drumline", "custom")
        assert out == {
            "allreduce": [3, 3], "allreduce of a list": [2, 2], "allreduce by name": [1, 1], "broadcast": [2, 2],
            "broadcast by name": [1, 1], "options": [3, 3], "allgather": [[1, 1], [2, 2]],
            "reduce_scatter": [3, 3], "scatter": [2 * (rank + 1)] * 2,
        }  # fmt: skip


def unwaited(rank, world_size, directory):
    """How many tensors live on after messages and collectives for which nobody waits."""
    connect(rank, world_size, directory)
    alive = []

    def tensor():
        array = np.ones(1000, np.float32)
        alive.append(weakref.ref(array))  # it lives as long as the tensor's memory is in use
        return torch.from_numpy(array)

    for _ in range(100):
        dist.isend(tensor(), 1 - rank)
        dist.recv(torch.zeros(1000), 1 - rank)
        dist.all_reduce(tensor(), async_op=True)
    for _ in range(50):
        dist.all_reduce(torch.ones(1), async_op=True).wait()
    left = sum(it() is not None for it in alive)
    dist.destroy_process_group()
    return left


def test_tensors_of_works_for_which_nobody_waits_are_dropped():
    for left in run(2, unwaited):
        assert left == 0


def tells_its_hooks(rank, world_size, directory):
    connect(rank, world_size, directory)
    group, told = dist.group.WORLD, []
    group.register_abort_hook(1, lambda: told.append("abort"))
    group.register_abort_hook(2, lambda: told.append("never"))
    group.unregister_abort_hook(2)
    group.register_abort_hook(3, lambda: 1 / 0)
    dist.all_reduce(torch.ones(2))
    before = list(told)
    if rank == 1:
        dist.distributed_c10d._abort_process_group()
        return before, told
    for _ in range(2):
        with pytest.raises(dist.DistBackendError):
            dist.all_reduce(torch.ones(2), async_op=True).wait()
    return before, told


@since(2, 14, what="abort hooks")
def test_hooks_hear_once_of_a_failed_group_and_of_an_abort():
    assert run(2, tells_its_hooks) == [([], ["abort"])] * 2


def refuses(rank, world_size, directory):
    connect(rank, world_size, directory)
    group, backend, said = dist.group.WORLD, dist.group.WORLD._get_backend(torch.device("cpu")), {}
    for what, call in {
        "shrinking operations": lambda: dist.shrink_group([1]),
        "new_window": group.new_window,
        "onCompletion hook": lambda: group._register_on_completion_hook(print),
        "get_reconfigure_handle": group.get_reconfigure_handle,
        "merge": lambda: group.merge_remote_group(dist.HashStore(), 2, dist.default_pg_timeout),
        "suspend": backend.suspend,
        "resume": backend.resume,
    }.items():
        with pytest.raises((TypeError, RuntimeError, NotImplementedError)) as error:
            call()
        said[what] = str(error.value)
    dist.all_reduce(torch.ones(2))
    dist.destroy_process_group()
    return said


@since(2, 14, what="windows")
def test_what_drumline_lacks_is_refused_by_name_and_the_group_goes_on():
    for told in run(2, refuses):
        for what, text in told.items():
            assert what in text, text


def forked_after_a_group(rank, world_size, directory):
    """The children of a process that has used groups make one of their own."""
    os.mkdir(f"{directory}/{rank}")
    connect(0, 1, f"{directory}/{rank}")
    dist.all_reduce(torch.ones(2), async_op=True).wait()
    dist.destroy_process_group()
    child = os.fork()
    if child == 0:
        signal.alarm(60)  # nobody else ends it if it hangs
        code = 1
        try:
            connect(rank, world_size, directory)
            tensor = torch.ones(2)
            dist.all_reduce(tensor, async_op=True).wait()
            dist.all_reduce(tensor, async_op=True).get_future().wait()
            dist.destroy_process_group()
            code = 0 if tensor.tolist() == [4, 4] else 2
        finally:
            os._exit(code)
    return os.waitpid(child, 0)[1]


def test_forks_of_a_process_that_has_used_groups_can_make_their_own():
    assert run(2, forked_after_a_group) == [0, 0]


def leaves_for_another_group(rank, world_size, directory, dies):
    """Rank 2 fails in a group with rank 1, or cannot make it, and leaves all groups. Returns what rank 0 hears."""
    os.environ.update(DRUMLINE_SHARED_MEMORY="0", DRUMLINE_UNIX_SOCKETS="0")
    connect(rank, world_size, directory)
    dist.barrier()
    if rank == 0:
        with pytest.raises(dist.DistBackendError) as error:
            dist.barrier()
        open(f"{directory}/over", "w").close()
        return str(error.value)
    if rank == 1 and dies:
        wait_for(f"{directory}/waits")
        os.kill(os.getpid(), signal.SIGKILL)
    open(f"{directory}/waits", "w").close()
    # Only a launcher knows of a rank that ends before it comes.
    limit = timedelta(seconds=5) if dies else None
    with pytest.raises(dist.DistError):
        pair = dist.new_group([1, 2], limit, use_local_synchronization=True)
        dist.barrier(pair) if rank == 1 else dist.all_reduce(torch.ones(2), group=pair)
    if rank == 1:
        wait_for(f"{directory}/over")
    else:
        dist.destroy_process_group()
    return None


@pytest.mark.parametrize("dies", [True, False])
def test_a_rank_that_leaves_after_a_failure_in_another_group_says_why(dies):
    (how, text), *_ = run_and_see(3, leaves_for_another_group, dies)
    assert how == "returned" and "peer_left" not in text, text
    if dies:
        assert re.search("process of rank [01] .*has ended", text), text
    else:
        assert "barrier" in text and "all_reduce" in text, text


def metrics(rank, world_size, directory):
    import drumline

    connect(rank, world_size, directory)
    pair = dist.new_group([0, 1])
    for group in (None, pair, pair):
        dist.all_reduce(torch.ones(4), group=group)
    text = drumline.metrics_text()
    dist.destroy_process_group()
    return text, drumline.metrics_text()


def test_calls_of_torchs_groups_are_counted_for_prometheus():
    for rank, (text, after) in enumerate(run(2, metrics)):
        calls = re.findall(
            rf'^drumline_calls_total{{group="(.*)",rank="{rank}",operation="all_reduce"}} (\d+)$',
            text, re.MULTILINE,
        )  # fmt: skip
        assert dict(calls)["world"] == "1", text
        assert sorted(count for _, count in calls) == ["1", "2"], text
        assert "{" not in after, after
