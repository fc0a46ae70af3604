"""drumline's DistributedDataParallel, and torch's, with parameters on GPUs: on a stand-in for the driver.

No hardware: parameters on torch's device ``meta`` have no values for torch, so tests give gradients, and look at what
the stand-in has.
"""

from __future__ import annotations

import numpy as np
import pytest
from gpus import Gpus
from ranks import run, run_and_see
from torch_versions import needs_backends, since

pytest.importorskip("torch")


def start(rank, world_size, directory):
    import drumline
    from drumline.torch import on_device

    gpus = on_device.GPUS = Gpus()
    return gpus, drumline.init_process_group(
        f"file://{directory}/store", rank=rank, world_size=world_size
    )


def tensor_on(gpus, device, values):
    import torch

    on_gpu = device.type == "meta"
    return gpus.tensor(values) if on_gpu else torch.tensor(values, dtype=torch.float32)


def values_of(gpus, tensor):
    return gpus.get(tensor) if tensor.device.type == "meta" else tensor.detach().numpy()


def model_of(gpus, rank, sizes, devices=("meta",)):
    """A module whose gradients are given: ``values[i]`` for parameter ``i``, or None for no gradient."""
    import torch

    class Give(torch.autograd.Function):
        @staticmethod
        def forward(ctx, parameter, values):
            ctx.values, ctx.device = values, parameter.device
            return torch.zeros(())

        @staticmethod
        def backward(ctx, _):
            return tensor_on(gpus, ctx.device, ctx.values), None

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            for at, size in enumerate(sizes):
                device = torch.device(devices[at % len(devices)])
                values = tensor_on(gpus, device, np.full(size, 10 * rank + at))
                self.register_parameter(f"p{at}", torch.nn.Parameter(values))
            self.register_buffer("mean", gpus.tensor(np.full(3, rank + 0.5)))

        def forward(self, values):
            pairs = zip(self.parameters(), values, strict=True)
            return sum(Give.apply(it, value) for it, value in pairs if value is not None)

    return Model()


def steps(rank, world_size, directory, hook, devices):
    import drumline
    from drumline.ddp import fp16_compress
    from drumline.ddp.device_buckets import DeviceBuckets

    gpus, group = start(rank, world_size, directory)
    sizes = [(5,), (300, 7), (2, 3), (4000,)]
    module = model_of(gpus, rank, sizes, devices)
    views = world_size == 2
    model = drumline.DistributedDataParallel(
        module, bucket_cap_mb=0.01, gradient_as_bucket_view=views, check_every=1
    )
    if hook:
        model.register_comm_hook(None, fp16_compress)
    assert isinstance(model.reducer._buckets, DeviceBuckets)
    assert len(model.reducer._buckets._buckets) > 1
    for at, parameter in enumerate(module.parameters()):
        assert (values_of(gpus, parameter) == at).all(), "rank 0's values"
    for step in range(3):
        values = [np.full(size, 4.0 * rank + at + step) for at, size in enumerate(sizes)]
        model(values).backward()
        assert (gpus.get(module.mean) == 0.5).all()
        for at, parameter in enumerate(module.parameters()):
            expected = 4.0 * (world_size - 1) / 2 + at + step
            found = values_of(gpus, parameter.grad)
            np.testing.assert_array_equal(found, np.full(sizes[at], expected))
            place = model.reducer._buckets.places.tensors[at].untyped_storage()
            assert (parameter.grad.untyped_storage()._cdata == place._cdata) is views
            parameter.grad = None
        gpus.set(module.mean, rank)
        if rank == 0:
            gpus.set(module.mean, 0.5)
    model.reducer.stop()
    group.destroy()


@pytest.mark.parametrize("hook", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_gradients_on_gpus_are_averaged_where_they_are(world_size, hook):
    run(world_size, steps, hook, ["meta"])


@pytest.mark.parametrize("hook", [False, True])
def test_a_module_may_lie_on_several_devices(hook):
    # torch's device meta has no numbers, so the second one is the CPU here.
    run(2, steps, hook, ["meta", "cpu"])


def one_dies(rank, world_size, directory):
    import os

    import drumline

    gpus, _ = start(rank, world_size, directory)
    model = drumline.DistributedDataParallel(model_of(gpus, rank, [(5,), (6,)]))
    values = [np.ones(5), np.ones(6)]
    model(values).backward()
    if rank == 1:
        os._exit(3)
    with pytest.raises(drumline.DrumlineError, match="rank 1"):
        for _ in range(1000):
            model(values).backward()
    with pytest.raises((drumline.DrumlineError, RuntimeError)):
        model(values).backward()


def test_a_rank_that_dies_is_named():
    (how, what), other = run_and_see(2, one_dies)
    assert how == "returned", what
    assert other == ("exited", 3)


def kept(rank, world_size, directory, what):
    import torch

    from drumline.ddp.device_buckets import Devices

    gpus, group = start(rank, world_size, directory)
    tensors = [gpus.tensor([1]), gpus.tensor([2]), torch.zeros(1)]
    if rank == 1 and what == "no tensor on a GPU":
        tensors = [torch.zeros(1)] * 3
    elif rank == 1 and what == "spread otherwise":
        tensors.reverse()
    elif rank == 1 and what == "no driver":
        gpus.library = "/no/libcuda.so"
    devices = Devices(group._group, tensors)
    devices.leave(5.0)
    group.destroy()
    return devices.are_used


@pytest.mark.parametrize("what", ["no tensor on a GPU", "spread otherwise", "no driver", ""])
def test_gpus_are_used_if_all_ranks_use_them_in_the_same_way(what):
    assert run(2, kept, what) == [not what] * 2


def a_gradient_is_missing(rank, world_size, directory):
    import drumline

    gpus, group = start(rank, world_size, directory)
    module = model_of(gpus, rank, [(5,), (6,)])
    model = drumline.DistributedDataParallel(module)
    with pytest.raises(drumline.NotBroughtError, match="rank 1 has not brought p1"):
        model([np.ones(5), np.ones(6) if rank == 0 else None]).backward()
    model.zero_grad()
    model([np.full(5, rank), np.full(6, rank)]).backward()
    assert (gpus.get(module.p1.grad) == 0.5).all()
    model.reducer.stop()
    group.destroy()


def test_a_missing_gradient_is_named_and_the_next_step_works():
    run(2, a_gradient_is_missing)


def torchs(rank, world_size, directory):
    import torch
    import torch._C._distributed_c10d as c10d
    import torch.distributed as dist

    from drumline.torch import on_device

    gpus = on_device.GPUS = Gpus()
    store = dist.FileStore(f"{directory}/store", world_size)
    dist.init_process_group(
        "cpu:drumline,meta:drumline", store=store, rank=rank, world_size=world_size
    )
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    module = torch.nn.Sequential(*(torch.nn.Linear(300, 300, device="meta") for _ in range(12)))
    # Else torch has one bucket in the first backward.
    options = {"find_unused_parameters": True, "bucket_cap_mb": 0.5, "init_sync": False}
    model = torch.nn.parallel.DistributedDataParallel(module, **options)
    seen = []

    def hook(_, bucket):
        # What torch's own does. Its dispatcher has calls on meta tensors that reach no backend.
        buffer = bucket.buffer()
        gpus.set(buffer, rank + len(seen))
        options = c10d.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.AVG
        work = backend.allreduce([buffer], options)
        seen.append((buffer, work, len(seen)))
        return work.get_future().then(lambda future: future.value()[0])

    model.register_comm_hook(None, hook)
    loss = model(torch.zeros(2, 300, device="meta")).sum()
    # The ends on GPUs are made by all ranks together, and rank 1 comes to nothing else before rank 0 is through.
    backend.eager_connect_single_device(torch.device("meta", 0))
    if rank == 1:
        store.wait(["rank 0 is through its backward"])
    loss.backward()
    if rank == 0:
        assert not any(work._handles[0].is_completed() for _, work, _ in seen)
        store.set("rank 0 is through its backward", "")
    assert len(seen) > 2
    for buffer, work, number in seen:
        work.wait()
        assert (gpus.get(buffer) == number + 0.5).all()
    assert gpus.copies == 0
    dist.destroy_process_group()


@needs_backends
@since(2, 11, what="init_sync of DistributedDataParallel")
def test_hooks_of_torch_are_not_blocked_and_a_bucket_is_one_call_without_a_copy():
    run(2, torchs)
