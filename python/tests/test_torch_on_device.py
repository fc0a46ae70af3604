"""torch's calls on CUDA tensors, on a stand-in for the driver.

No hardware: tensors of torch's device ``meta`` stand for CUDA's (`gpus.Gpus`). So torch's own part is not tested here:
its streams, its allocator, and which of its tensors are on which GPU.
"""

from __future__ import annotations

import numpy as np
import pytest
from gpus import Gpus
from ranks import run
from torch_versions import TELLS_WHO_WAITS, needs_backends

pytestmark = needs_backends


def start(rank, world_size, directory):
    """The GPUs, and the backend of all ranks."""
    import torch
    import torch.distributed as dist

    from drumline.torch import on_device

    gpus = on_device.GPUS = Gpus()
    store = dist.FileStore(f"{directory}/store", world_size)
    dist.init_process_group("drumline", store=store, rank=rank, world_size=world_size)
    return gpus, dist.group.WORLD._get_backend(torch.device("cpu"))


class Call:
    """What torch's functions do with a backend: options, and ``wait()``."""

    def __init__(self, rank, backend):
        self.rank, self.backend = rank, backend

    def __call__(self, method, options, *tensors, **settings):
        import torch._C._distributed_c10d as c10d

        opts = getattr(c10d, options)()
        for name, value in settings.items():
            if name != "asyncOp" or TELLS_WHO_WAITS:
                setattr(opts, name, value)
        work = getattr(self.backend, method)(*tensors, opts)
        work.wait()
        assert work.exception() is None
        return work


def singles(rank, world_size, directory):
    import torch.distributed as dist

    gpus, backend = start(rank, world_size, directory)
    call, seen = Call(rank, backend), []
    with pytest.warns(UserWarning, match="not been verified"):
        data = gpus.tensor(np.full(3000, rank + 1))
        call("allreduce", "AllreduceOptions", [data])
    seen.append(gpus.get(data)[0])
    call("allreduce", "AllreduceOptions", [data], reduceOp=dist.ReduceOp.AVG, asyncOp=True)
    seen.append(gpus.get(data)[0])
    own = gpus.tensor([rank, rank])
    call("broadcast", "BroadcastOptions", [own], rootRank=world_size - 1)
    seen.append(gpus.get(own)[0])
    every = gpus.tensor(np.zeros(2 * world_size))
    own = gpus.tensor([rank, rank])
    call("all_gather_single", "AllgatherOptions", every, own)
    seen.append(gpus.get(every)[::2].tolist())
    call("reduce_scatter_single", "ReduceScatterOptions", own, every)
    seen.append(gpus.get(own)[0])
    own = gpus.tensor([rank + 1, rank + 1])
    call("reduce", "ReduceOptions", [own], rootRank=0)
    seen.append(gpus.get(own)[0])
    swapped = gpus.tensor(np.zeros(2 * world_size))
    own = gpus.tensor([100 * rank + to for to in range(world_size) for _ in range(2)])
    call("all_to_all_single", "AllToAllOptions", swapped, own, [], [])
    seen.append(gpus.get(swapped)[::2].tolist())
    assert gpus.copies == 0
    dist.destroy_process_group()
    return seen


@pytest.mark.parametrize("world_size", [1, 2])
def test_tensors_are_taken_from_where_they_are(world_size):
    for rank, seen in enumerate(run(world_size, singles)):
        total = sum(range(1, world_size + 1))
        every = list(range(world_size))
        assert seen == [
            total, total, world_size - 1, every, rank * world_size, total if rank == 0 else rank + 1,
            [100 * source + rank for source in range(world_size)],
        ]  # fmt: skip


def lists(rank, world_size, directory):
    import torch.distributed as dist

    gpus, backend = start(rank, world_size, directory)
    call, ranks = Call(rank, backend), range(world_size)
    length = lambda of: 5 * of + 1  # noqa: E731

    def room(lengths):
        return [gpus.tensor(np.full(n, 99)) for n in lengths]

    def check(tensors, expected):
        for tensor, values in zip(tensors, expected, strict=True):
            np.testing.assert_array_equal(gpus.get(tensor), np.asarray(values, np.float32))

    # Uneven, where the host takes that.
    got = room(map(length, ranks))
    call("allgather", "AllgatherOptions", [got], [gpus.tensor(np.full(length(rank), rank))])
    check(got, [np.full(length(of), of) for of in ranks])
    own = room([length(rank)])
    dealt = [gpus.tensor(np.full(length(to), to + rank)) for to in ranks]
    call("reduce_scatter", "ReduceScatterOptions", own, [dealt])
    check(own, [np.full(length(rank), world_size * rank + sum(ranks))])
    pair = lambda source, to: (source + 2 * to) % 3  # noqa: E731
    got = room(pair(source, rank) for source in ranks)
    sent = [gpus.tensor(np.full(pair(rank, to), 10 * rank + to)) for to in ranks]
    call("alltoall", "AllToAllOptions", got, sent)
    check(got, [np.full(pair(source, rank), 10 * source + rank) for source in ranks])
    send, receive = [pair(rank, to) for to in ranks], [pair(source, rank) for source in ranks]
    rows = gpus.tensor(np.concatenate([np.full((n, 2), to) for to, n in enumerate(send)]))
    back = gpus.tensor(np.full((sum(receive), 2), 99))
    call("all_to_all_single", "AllToAllOptions", back, rows, receive, send)
    check([back], [np.full((sum(receive), 2), rank)])
    # Only the root has a list.
    root, own = world_size - 1, gpus.tensor(np.full(3, rank))
    got = room([3] * world_size) if rank == root else []
    call("gather", "GatherOptions", [got] if got else [], [own], rootRank=root)
    check(got, [np.full(3, of) for of in ranks] if got else [])
    dealt = [gpus.tensor(np.full(3, 7 + to)) for to in ranks] if rank == root else []
    call("scatter", "ScatterOptions", [own], [dealt] if dealt else [], rootRank=root)
    check([own], [np.full(3, 7 + rank)])
    # Several calls in one.
    both = [gpus.tensor(np.full(4, rank)), gpus.tensor([rank, rank], np.int32)]
    call("allreduce_coalesced", "AllreduceCoalescedOptions", both)
    check(both, [np.full(4, sum(ranks)), np.full(2, sum(ranks))])
    own = [gpus.tensor(np.full(2, rank)), gpus.tensor(np.full(3, 10 + rank))]
    got = room([2 * world_size, 3 * world_size])
    call("all_gather_single_coalesced", "AllgatherOptions", got, own)
    check(got, [np.repeat(ranks, 2), np.repeat(ranks, 3) + 10])
    call("reduce_scatter_single_coalesced", "ReduceScatterOptions", own, got)
    check(own, [np.full(2, world_size * rank), np.full(3, world_size * (10 + rank))])
    got = [room([4, 1]) for _ in ranks]
    own = [gpus.tensor(np.full(4, rank)), gpus.tensor([-rank])]
    call("allgather_coalesced", "AllgatherOptions", got, own)
    check(sum(got, []), [values for of in ranks for values in (np.full(4, of), [-of])])
    assert gpus.copies == 0
    dist.destroy_process_group()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_lists_and_uneven_blocks_need_no_copy_on_the_gpu(world_size):
    run(world_size, lists)


def messages(rank, world_size, directory):
    import torch
    import torch._C._distributed_c10d as c10d
    import torch.distributed as dist

    gpus, backend = start(rank, world_size, directory)
    if rank == 0:
        # From any rank, into memory of the GPU. The sender has used memory of the CPU.
        got = gpus.tensor(np.zeros(3))
        work = backend.recv_anysource([got], 5)
        assert work.source_rank() == 1
        work.wait()
        assert gpus.get(got).tolist() == [7, 7, 7]
        # Only one of three columns, and the other way round.
        wide = gpus.tensor(np.zeros((4, 3)))
        work = backend.recv([wide[:, 1]], 1, 6)
        work.wait()
        assert gpus.get(wide).tolist() == [[0, at, 0] for at in range(4)]
        with pytest.raises(ValueError, match="nonnegative"):
            backend.send([got], 1, -1)
        for at in range(10):
            backend.send([gpus.tensor([at])], 1, 7)
    elif rank == 1:
        backend.send([torch.full((3,), 7.0)], 0, 5).wait()
        sent = backend.send([gpus.tensor(np.arange(4))], 0, 6)
        assert sent.get_future().wait() is not None
        columns = [gpus.tensor([99]) for _ in range(10)]
        for column in columns:
            backend.recv([column], 0, 7).wait()
        assert [gpus.get(column)[0] for column in columns] == list(range(10))
    options = c10d.BarrierOptions()
    options.device = torch.device("meta")
    backend.barrier(options).wait()
    # A send that nobody has waited for arrives before its rank leaves.
    if rank == 2:
        backend.send([gpus.tensor([3])], 0, 8)
    last = torch.zeros(1)
    if rank == 0:
        assert backend.recv([last], 2, 8).wait()
        assert last.item() == 3
    dist.destroy_process_group()


def test_messages_are_queued_and_may_end_on_a_cpu():
    run(3, messages)


def odd_tensors(rank, world_size, directory):
    import torch
    import torch._C._distributed_c10d as c10d
    import torch.distributed as dist

    gpus, backend = start(rank, world_size, directory)
    call = Call(rank, backend)
    # Elements that do not lie side by side, on one rank only.
    matrix = gpus.tensor(np.arange(6).reshape(2, 3))
    data = matrix.t() if rank == 0 else gpus.tensor(np.arange(6).reshape(2, 3).T)
    call("allreduce", "AllreduceOptions", [data])
    np.testing.assert_array_equal(gpus.get(data), 2 * np.arange(6).reshape(2, 3).T)
    assert gpus.copies == (2 if rank == 0 else 0)
    # It is copied back once, and whoever waits again waits for that.
    work = backend.allreduce([data], c10d.AllreduceOptions())
    work.wait()
    assert gpus.followed == 0
    work.wait()
    assert gpus.followed == (1 if rank == 0 else 0)
    assert gpus.copies == (4 if rank == 0 else 0)
    np.testing.assert_array_equal(gpus.get(data), 4 * np.arange(6).reshape(2, 3).T)
    # The second column of three, gathered.
    got = gpus.tensor(np.zeros((2, 2, 2)))
    own = gpus.tensor(np.arange(6).reshape(2, 3) + 10 * rank)[:, 1]
    call("allgather", "AllgatherOptions", [[got[:, :, of] for of in range(2)]], [own.unsqueeze(1).expand(2, 2)])
    found = gpus.get(got)
    for of in range(2):
        np.testing.assert_array_equal(found[:, :, of], np.array([[1, 1], [4, 4]]) + 10 * of)
    # One call, tensors on two devices.
    with pytest.raises(ValueError, match="on meta and cpu"):
        call("alltoall", "AllToAllOptions", [torch.zeros(1)] * 2, [gpus.tensor([0])] * 2)
    dist.destroy_process_group()


def test_elements_that_do_not_lie_side_by_side_are_copied_on_the_gpu():
    run(2, odd_tensors)


def one_on_a_cpu(rank, world_size, directory, is_first):
    """Rank 1 has its tensor on the CPU."""
    from datetime import timedelta

    import torch
    import torch._C._distributed_c10d as c10d
    import torch.distributed as dist

    gpus, backend = start(rank, world_size, directory)
    call = Call(rank, backend)
    if not is_first:
        call("allreduce", "AllreduceOptions", [gpus.tensor([rank])])
    options = c10d.AllreduceOptions()
    if TELLS_WHO_WAITS:
        options.asyncOp = False
    data = gpus.tensor(np.zeros(4)) if rank == 0 else torch.zeros(4)
    if not is_first and rank == 1:
        options.timeout = timedelta(seconds=2)
    with pytest.raises(dist.DistBackendError) as failure:
        work = backend.allreduce([data], options)
        work.wait(timedelta(seconds=20))
    return str(failure.value)


def test_a_rank_with_its_tensor_on_the_cpu_is_told_and_so_are_the_others():
    for rank, text in enumerate(run(2, one_on_a_cpu, True)):
        assert f"rank {1 - rank} called" in text
        assert "of 1 u8" in text and "of 4 f32" in text
        assert "all ranks pass tensors on GPUs, or none does" in text


def test_later_such_a_call_ends_by_its_time_limit():
    texts = run(2, one_on_a_cpu, False)
    assert "rank 1" in texts[0] and "of 4 f32" in texts[0]
    assert "rank 0" in texts[1] and "of 4 f32" in texts[1]


def one_without_a_driver(rank, world_size, directory):
    import torch
    import torch.distributed as dist

    from drumline.torch.tensors import Staging

    gpus, backend = start(rank, world_size, directory)
    if rank == 1:
        gpus.library = "/no/libcuda.so"
    with pytest.warns(UserWarning, match="/no/libcuda.so" if rank == 1 else "not been verified"):
        staging = backend._staging_on(torch.device("meta"))
    assert type(staging) is Staging
    dist.destroy_process_group()


def test_all_ranks_stage_where_one_has_no_driver():
    run(2, one_without_a_driver)


def anything(rank, world_size, directory, seed):
    """The same calls on GPUs and on CPUs, in a common order that chance has made, with the same results."""
    import random

    import torch
    import torch.distributed as dist

    gpus, backend = start(rank, world_size, directory)
    call, common = Call(rank, backend), random.Random(seed)
    own = np.random.default_rng(100 * seed + rank)

    def pair(*shape):
        """A tensor of the CPU, and one of the GPU with the same elements, that may lie apart."""
        values = own.integers(-9, 9, shape).astype(np.float32)
        there = gpus.tensor(values) if own.random() < 0.7 else gpus.tensor(values.T).t()
        return torch.from_numpy(values), there

    # Of these arguments torch makes lists of lists: the outputs, or the inputs.
    nested = {"allgather": 0, "gather": 0, "scatter": 1, "reduce_scatter": 1}

    def both(method, options, *lists, **settings):
        """Calls with lists of pairs, on either device."""
        for which in (0, 1) if common.random() < 0.5 else (1, 0):
            tensors = [[one[which] for one in it] for it in lists]
            if method in nested:
                at = nested[method]
                tensors[at] = [tensors[at]] if tensors[at] else []
            call(method, options, *tensors, **settings)
        for it in lists:
            for here, there in it:
                np.testing.assert_array_equal(gpus.get(there), here.numpy(), err_msg=method)

    for _ in range(40):
        n, root = common.randrange(1, 3000), common.randrange(world_size)
        op = common.choice([dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.AVG])
        some = lambda: [pair(n, 2) for _ in range(world_size)]  # noqa: B023, E731
        match common.randrange(8):
            case 0:
                both("allreduce", "AllreduceOptions", [pair(n, 2)], reduceOp=op)
            case 1:
                both("broadcast", "BroadcastOptions", [pair(n, 2)], rootRank=root)
            case 2:
                both("reduce", "ReduceOptions", [pair(n, 2)], rootRank=root, reduceOp=op)
            case 3:
                both("allgather", "AllgatherOptions", some(), [pair(n, 2)])
            case 4:
                got = some() if rank == root else []
                both("gather", "GatherOptions", got, [pair(n, 2)], rootRank=root)
            case 5:
                dealt = some() if rank == root else []
                both("scatter", "ScatterOptions", [pair(n, 2)], dealt, rootRank=root)
            case 6:
                both("reduce_scatter", "ReduceScatterOptions", [pair(n, 2)], some(), reduceOp=op)
            case 7:
                both("alltoall", "AllToAllOptions", some(), some())
    dist.destroy_process_group()


@pytest.mark.parametrize("seed", range(3))
def test_any_calls_have_the_results_of_cpus(seed):
    run(3, anything, seed)
