"""drumline.DistributedDataParallel beside torch's, on groups of every kind, from its beginning to its end."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import time
import warnings

import pytest
from ddp_models import KINDS, bits, connect, gradients, network, train
from ranks import run

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402

from drumline import DistributedDataParallel  # noqa: E402


def beside_torch(rank, world_size, directory):
    out = {}
    for kind in (*KINDS, "plain"):
        leave = connect(rank, world_size, directory, kind)
        if kind == "gloo":
            theirs = torch.nn.parallel.DistributedDataParallel(network())
            out["torch"] = train(theirs, rank), bits(theirs)
        model = DistributedDataParallel(network())
        out[kind] = train(model, rank), bits(model)
        model.reducer.stop()
        leave()
    return out


def test_training_is_that_of_torch_and_gloo():
    first, second = run(2, beside_torch)
    for kind in (*KINDS, "plain"):
        for out in (first, second):
            assert out[kind][0] == pytest.approx(out["torch"][0], rel=1e-6, abs=1e-7)
        assert first[kind][1] == second[kind][1], "parameters differ between ranks"
    assert all(first[kind] == first["plain"] for kind in KINDS)


def states(rank, world_size, directory):
    leave = connect(rank, world_size, directory)
    torch.manual_seed(rank)
    inner = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(inner, ["0.bias"])
    own_bias = inner[0].bias.tolist()
    inner[1].running_mean.fill_(rank)
    model = DistributedDataParallel(inner)
    names = list(model.state_dict())
    begins = inner[0].weight.tolist(), inner[0].bias.tolist() == own_bias
    # Evaluation on one rank alone sends nothing.
    model.eval()
    if rank == 0:
        with torch.no_grad():
            model(torch.ones(3, 2))
    model.train()
    inner[1].running_mean.fill_(10.0 + rank)
    with model.no_sync():
        model(torch.ones(3, 2))
    without = inner[1].num_batches_tracked.item(), inner[1].running_mean.tolist()
    model(torch.randn(3, 2))
    buffers = inner[1].running_var.tolist() != [1.0, 1.0]
    again = pickle.loads(pickle.dumps(model))
    deep = copy.deepcopy(model)
    for one in (again, deep):
        one(torch.full((2, 2), float(rank))).square().sum().backward()
    same = gradients(again) == gradients(deep)
    again.reducer.stop()
    deep.reducer.stop()
    leave()
    return names, begins, without, buffers, same, again.module[0].weight.grad.tolist()


def test_states_are_those_of_rank_0_and_have_torchs_names():
    first, second = run(2, states)
    for names, begins, without, buffers, same, _ in (first, second):
        assert names[0] == "module.0.weight" and "module.1.running_mean" in names
        assert begins[1], "an ignored parameter was touched"
        assert buffers and same and without[0] == 1
    assert first[1][0] == second[1][0]
    assert first[2][1] != second[2][1], "buffers travelled in no_sync"
    assert first[5] == second[5]


def uneven(rank, world_size, directory):
    leave = connect(rank, world_size, directory, "gloo")

    def train_unevenly(model, by_initial):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with model.join(divide_by_initial_world_size=by_initial):
            for step in range(2 + 2 * rank):
                x = torch.randn(4, 12, generator=torch.Generator().manual_seed(10 * rank + step))
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
        return torch.cat([it.detach().reshape(-1) for it in model.parameters()])

    out = []
    for by_initial in (True, False):
        model = DistributedDataParallel(network(), find_unused_parameters=by_initial)
        ours = train_unevenly(model, by_initial)
        theirs = train_unevenly(torch.nn.parallel.DistributedDataParallel(network()), by_initial)
        out.append((ours, torch.allclose(ours, theirs, rtol=1e-4, atol=1e-5)))
        model.reducer.stop()
    model = DistributedDataParallel(torch.nn.Linear(2, 2))
    with pytest.raises(RuntimeError, match="no data left") as raised:
        with model.join(throw_on_early_termination=True):
            for _ in range(1 + rank):
                model(torch.ones(1, 2)).sum().backward()
    leave()
    return [(it.tolist(), same) for it, same in out], str(raised.value)


def test_ranks_may_have_different_numbers_of_batches_as_with_torch():
    first, second = run(2, uneven)
    assert first[0] == second[0], "parameters differ at the end"
    assert all(same for _, same in first[0])
    assert first[0][0][0] != first[0][1][0]
    assert "[0]" in first[1] and "[0]" in second[1]


def cycles(rank, world_size, directory):
    leave = connect(rank, world_size, directory)

    def resources():
        gc.collect()
        maps = sum("memfd" in line for line in open("/proc/self/maps"))
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), maps

    before = None
    for cycle in range(12):
        model = DistributedDataParallel(network())
        for _ in range(3):
            model(torch.ones(4, 12)).sum().backward()
        if cycle % 2:
            model.reducer.stop()
        del model
        if cycle == 3:
            dist.barrier()
            before = resources()
    dist.barrier()
    # The last connections are closed in the background.
    until = time.monotonic() + 10
    while more(after := resources(), before) and time.monotonic() < until:
        time.sleep(0.01)
    leave()
    return before, after


def more(after, before):
    return any(now > then for now, then in zip(after, before, strict=True))


def test_wrappers_leave_nothing_behind():
    for before, after in run(2, cycles):
        assert not more(after, before), (before, after)


def elsewhere(rank, world_size, directory):
    leave = connect(rank, world_size, directory)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            model = DistributedDataParallel(torch.nn.Linear(2, 2), device_ids=[rank])
            model(torch.ones(1, 2)).sum().backward()
            model.reducer.stop()
    with pytest.raises(TypeError, match="wraps a module.* str"):
        DistributedDataParallel("model")
    with pytest.raises(TypeError, match="process group is one of torch's.*'gloo'"):
        DistributedDataParallel(torch.nn.Linear(2, 2), process_group="gloo")
    with pytest.raises(ValueError, match="bucket_cap_mb.* -1"):
        DistributedDataParallel(torch.nn.Linear(2, 2), bucket_cap_mb=-1)
    with pytest.raises(ValueError, match="single element"):
        DistributedDataParallel(torch.nn.Linear(2, 2), device_ids=[0, 1])
    with pytest.raises(TypeError, match="UninitializedParameter"):
        DistributedDataParallel(torch.nn.LazyLinear(2))
    with pytest.raises(RuntimeError, match="require a gradient"):
        DistributedDataParallel(torch.nn.Linear(2, 2).requires_grad_(False))
    leave()
    return [str(it.message) for it in said if "no GPU" in str(it.message)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_device_means_the_cpu_where_there_is_no_gpu():
    assert [len(said) for said in run(2, elsewhere)] == [1, 1]


def test_a_group_is_needed():
    with pytest.raises(RuntimeError, match="init_process_group"):
        DistributedDataParallel(torch.nn.Linear(2, 2))
