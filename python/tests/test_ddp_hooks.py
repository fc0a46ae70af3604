"""Communication hooks of drumline.DistributedDataParallel."""

from __future__ import annotations

import pytest
from ddp_models import bits, connect, network, train
from ranks import run

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402

from drumline import DistributedDataParallel, ddp  # noqa: E402


def with_hooks(rank, world_size, directory):
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    leave = connect(rank, world_size, directory, "gloo")
    calls = []

    def plain(state, bucket):
        calls.append((bucket.index(), bucket.is_last(), len(bucket.parameters())))
        assert bucket.gradients()[0].shape == bucket.parameters()[0].shape
        work = dist.all_reduce(bucket.buffer().div_(world_size), async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    def replaced(state, bucket):
        state.append(bucket.buffer().dtype)
        shorter = bucket.buffer().to(torch.float16).div_(world_size)
        future = dist.all_reduce(shorter, async_op=True).get_future()
        return future.then(lambda it: it.value()[0].to(torch.float32))

    state = powerSGD_hook.PowerSGDState(None, 2, 5)
    hooks = {
        "none": (None, None),
        "plain": (None, plain),
        "replaced": ([], replaced),
        "fp16": (None, ddp.fp16_compress),
        "bf16": (None, ddp.bf16_compress),
        "torch's fp16": (None, default_hooks.fp16_compress_hook),
        "torch's all_reduce": (None, default_hooks.allreduce_hook),
        "torch's PowerSGD": (state, powerSGD_hook.powerSGD_hook),
        "PowerSGD": (
            ddp.PowerSGDState(matrix_approximation_rank=2, start_powerSGD_iter=5),
            ddp.power_sgd,
        ),
    }
    out = {}
    for name, (state, hook) in hooks.items():
        model = DistributedDataParallel(network())
        if hook is not None:
            model.register_comm_hook(state, hook)
        out[name] = train(model, rank, steps=20), bits(model)
        model.reducer.stop()
    leave()
    return out, calls


def test_hooks_take_the_place_of_averaging():
    (first, calls), (second, _) = run(2, with_hooks)
    assert calls[0] == (0, True, 6) and len(calls) == 20
    exact = first["none"][0]
    for name, (losses, parameters) in first.items():
        assert parameters == second[name][1], name
        tolerance = {"none": 0.0, "plain": 1e-6, "torch's all_reduce": 0.0}.get(name, 0.05)
        assert losses == pytest.approx(exact, rel=tolerance, abs=tolerance), name
    assert first["fp16"] == first["torch's fp16"] != first["none"] != first["bf16"]
    # Compressed from step 5 on, and close.
    for name in ("PowerSGD", "torch's PowerSGD"):
        assert first[name][0][:5] == pytest.approx(exact[:5], rel=1e-6)
        assert first[name][0] != pytest.approx(exact, rel=1e-6)


def wrong_hooks(rank, world_size, directory):
    leave = connect(rank, world_size, directory)
    model = DistributedDataParallel(network())
    with pytest.raises(TypeError, match="callable"):
        model.register_comm_hook(None, 7)
    model.register_comm_hook(None, lambda state, bucket: bucket.buffer())
    with pytest.raises(TypeError, match="returns a Future"):
        model(torch.ones(4, 12)).sum().backward()


def test_a_hook_must_return_a_future():
    run(1, wrong_hooks)


def lacking(rank, world_size, directory):
    import drumline

    leave = connect(rank, world_size, directory)
    layers = torch.nn.ModuleList([torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)])
    layers.forward = lambda x: layers[0](x) if rank else layers[1](layers[0](x))
    model = DistributedDataParallel(layers)
    state = ddp.PowerSGDState(start_powerSGD_iter=100)
    model.register_comm_hook(state, ddp.power_sgd)
    with pytest.raises(drumline.NotBroughtError) as raised:
        model(torch.ones(2, 2)).sum().backward()
    model.reducer.stop()
    leave()
    return str(raised.value)


def test_unused_parameters_are_named_with_a_hook_too():
    for text in run(2, lacking):
        assert "rank 1 has not brought 1.weight" in text and "rank 0" not in text, text
