"""Types, layouts and recomputation under drumline.DistributedDataParallel."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from ddp_models import Checkpointed, bits, connect, differing, gradients, mean_of, network
from ranks import run

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402

import drumline  # noqa: E402
from drumline import DistributedDataParallel  # noqa: E402


class Spectral(torch.nn.Module):
    """Complex parameters beside others."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name, dtype in (("weight", torch.complex64), ("wide", torch.complex128), ("real", torch.float32)):
            value = torch.randn(4, 4, dtype=dtype, generator=generator)
            self.register_parameter(name, torch.nn.Parameter(value))

    def forward(self, x):
        # Gradients are conjugated lazily.
        modes = torch.fft.fft(x.to(torch.complex64)) @ self.weight.conj()
        return (modes @ self.wide.mH.to(torch.complex64)).real @ self.real


def spectral(rank, world_size, directory):
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    def all_reduce(state, bucket):
        work = dist.all_reduce(bucket.buffer().div_(world_size), async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    leave = connect(rank, world_size, directory)
    power = drumline.ddp.PowerSGDState(start_powerSGD_iter=0, min_compression_rate=0.5)
    hooks = [None, (None, all_reduce), (None, default_hooks.bf16_compress_hook), (power, drumline.ddp.power_sgd)]
    wrong = []
    for options, hook in [({}, it) for it in hooks] + [({"gradient_as_bucket_view": True}, None)]:
        model = DistributedDataParallel(Spectral(), find_unused_parameters=True, **options)
        if hook is not None:
            model.register_comm_hook(*hook)
        for step in (1, 2):
            model.zero_grad(set_to_none=step == 1)
            x = torch.randn(6, 4, generator=torch.Generator().manual_seed(rank))
            model(x).square().mean().backward()
            mean = mean_of(
                world_size,
                Spectral,
                lambda it, of: it(torch.randn(6, 4, generator=torch.Generator().manual_seed(of))).square().mean().backward(),
            )
            found = differing(model.parameters(), mean, rtol=1e-4, atol=1e-4)
            # Hooks make real numbers short.
            wrong += [(step, str(hook), it) for it in found if hook is None or it < 2 or hook[1] is all_reduce]
        model.reducer.stop()
    leave()
    return wrong


def test_complex_gradients_are_averaged_in_both_parts():
    for wrong in run(2, spectral):
        assert wrong == []


def reentrant(rank, world_size, directory):
    leave = connect(rank, world_size, directory)
    x = torch.full((3, 4), rank + 1.0, requires_grad=True)
    model = DistributedDataParallel(Checkpointed(), static_graph=True)
    seen = []
    for _ in range(3):
        model.zero_grad()
        model(x).sum().backward()
        seen.append(gradients(model))
    model.reducer.stop()
    plain = Checkpointed()
    for batch in (1.0, 2.0):
        plain(torch.full((3, 4), batch, requires_grad=True)).sum().div(2).backward()
    leave()
    return seen, gradients(plain)


def test_a_static_graph_may_use_parameters_in_several_reentrant_passes():
    (first, plain), (second, _) = run(2, reentrant)
    assert first == second
    for seen in first:
        for one, whole in zip(seen[:2], plain[:2], strict=True):
            torch.testing.assert_close(torch.tensor(one), torch.tensor(whole))
        assert seen[2:] == [None, None]


def precision(rank, world_size, directory):
    leave = connect(rank, world_size, directory)
    model = DistributedDataParallel(network())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    generator = torch.Generator().manual_seed(rank)
    losses = []
    for step in range(20):
        x = torch.randn(16, 12, generator=generator)
        with torch.autocast("cpu", torch.bfloat16):
            loss = (model(x) - 1).square().mean()
        if step == 10 and rank == 1:
            loss = loss * float("inf")
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    mixed = torch.nn.Sequential(torch.nn.Linear(3, 3).double(), torch.nn.Linear(3, 3).double())
    mixed = DistributedDataParallel(mixed.to(torch.bfloat16))
    mixed(torch.full((2, 3), 1.0 + rank, dtype=torch.bfloat16)).sum().backward()
    out = losses, bits(model), scaler.get_scale(), mixed.module[0].weight.grad.dtype
    leave()
    return out


def test_autocast_and_the_scaler_work_as_on_one_device():
    first, second = run(2, precision)
    assert first[1] == second[1] and first[2] == second[2] < 2.0**8
    assert first[0][-1] < first[0][0]
    assert first[3] is torch.bfloat16


@dataclasses.dataclass
class Prediction:
    loss: Any
    logits: dict[str, list[Any]]


class Images(torch.nn.Module):
    """Recomputes a part; has an empty parameter; returns a dataclass."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.filters = torch.nn.Conv2d(3, 4, 3)
        self.head = torch.nn.Linear(4, 2)
        self.empty = torch.nn.Parameter(torch.zeros(0))

    def forward(self, x):
        from torch.utils.checkpoint import checkpoint

        pooled = checkpoint(lambda x: self.filters(x).relu().mean((2, 3)), x, use_reentrant=False)
        y = self.head(pooled) + self.empty.sum()
        return Prediction(y.square().mean(), {"y": [y]})


def layouts(rank, world_size, directory, compiled):
    leave = connect(rank, world_size, directory)
    batches = torch.randn(world_size, 2, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    module, plain = Images().to(memory_format=torch.channels_last), Images()
    model = DistributedDataParallel(module)
    run_model = torch.compile(model, backend="aot_eager") if compiled else model
    run_model(batches[rank].to(memory_format=torch.channels_last)).loss.backward()
    for batch in batches:
        plain(batch).loss.div(world_size).backward()
    assert module.filters.weight.grad.stride() == module.filters.weight.stride()
    for ours, theirs in zip(module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
    leave()
    return gradients(model)


# A compiler takes its time to be imported.
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_layouts_recomputation_and_nested_outputs(compiled):
    first, second = run(2, layouts, compiled)
    assert first == second
