"""drumline.DistributedDataParallel beside torch's, on groups of every kind."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
import io
import itertools
import os
import pickle
import time
import warnings
from typing import Any

import pytest
from ranks import run
from torch_versions import HAS_BACKENDS

torch = pytest.importorskip("torch")
import torch._dynamo  # noqa: E402  optimizers do, which takes seconds on every rank
import torch.distributed as dist  # noqa: E402

import drumline  # noqa: E402
from drumline import DistributedDataParallel  # noqa: E402

# OpenMP's threads do not survive the fork of a rank, which would wait for them.
torch.set_num_threads(1)


# Of groups that torch makes. The wrapper is the same on all.
KINDS = ("gloo", "drumline") if HAS_BACKENDS else ("gloo",)


def connect(rank, world_size, directory, kind=KINDS[-1], **options):
    """A group, and how it is left."""
    path = f"{directory}/{kind}"
    if kind == "plain":
        store = drumline.FileStore(path, world_size)
        drumline.init_process_group(store=store, rank=rank, world_size=world_size)
        return drumline.destroy_process_group
    store = dist.FileStore(path, world_size)
    dist.init_process_group(kind, store=store, rank=rank, world_size=world_size, **options)
    return dist.destroy_process_group


def network():
    torch.manual_seed(5)
    layers = [torch.nn.Linear(12, 40), torch.nn.BatchNorm1d(40), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(40, 3))


def train(model, rank, steps=50):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    generator = torch.Generator().manual_seed(11)
    losses = []
    for step in range(steps):
        x = torch.randn(2, 16, 12, generator=generator)[rank]
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        loss = (model(x) - x[:, :3].sin()).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def bits(model):
    return b"".join(it.detach().numpy().tobytes() for it in model.parameters())


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


def small():
    torch.manual_seed(0)
    layers = torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 4)
    return torch.nn.Sequential(*layers)


def batch(rank, step):
    return torch.randn(5, 3, generator=torch.Generator().manual_seed(10 * rank + step))


def mean_of(world_size, module_of, train):
    """The mean over ranks of the gradients of ``train(module, rank)`` in one process."""
    mean = None
    for rank in range(world_size):
        alone = module_of()
        train(alone, rank)
        of_rank = [None if it.grad is None else it.grad / world_size for it in alone.parameters()]
        mean = [
            b if a is None else a if b is None else a + b
            for a, b in zip(mean or [None] * len(of_rank), of_rank, strict=True)
        ]
    return mean


def differing(parameters, mean, **near):
    """Which parameters have another gradient."""
    return [
        at
        for at, (it, right) in enumerate(zip(parameters, mean, strict=True))
        if (it.grad is None) != (right is None)
        or (right is not None and not torch.allclose(it.grad.to(right.dtype), right, **near))
    ]


def with_each(change):
    """A change of a model that is made to each parameter."""

    def act(model):
        for it in model.parameters():
            change(it)

    return act


def set_data(it):
    it.grad.data = it.grad.data / 2


def swap_gradients(model):
    """Two of one shape."""
    first, second = model.module[2].weight, model.module[2].weight.grad.t()
    first.grad = second
    first.grad.add_(1)


def load(model):
    model.load_state_dict({name: it.clone() for name, it in model.state_dict().items()})


def through_a_queue(model):
    queue = torch.multiprocessing.get_context("spawn").SimpleQueue()
    queue.put([it.grad for it in model.parameters()])
    queue.get()


def in_a_fork(model):
    """Which must not write to its parent's gradients, but with views."""
    before = gradients(model)
    child = os.fork()
    if child == 0:
        for it in model.parameters():
            it.grad.zero_()
        try:
            model(torch.ones(1, 3))
        except RuntimeError as error:
            os._exit("fork" not in str(error))
        os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    assert model.gradient_as_bucket_view or gradients(model) == before


CHANGES = {
    "replaced": with_each(lambda it: setattr(it, "grad", it.grad / 2)),
    "data": with_each(set_data),
    "detach_": with_each(lambda it: it.grad.detach_()),
    "set_": with_each(lambda it: it.grad.set_(torch.ones_like(it.grad))),
    "swapped": swap_gradients,
    "strides": with_each(lambda it: setattr(it, "grad", it.grad.t().contiguous().t())),
    "requires_grad_": with_each(lambda it: it.grad.requires_grad_()),
    "data of another type": with_each(lambda it: setattr(it.grad, "data", it.grad.double())),
    "none": with_each(lambda it: setattr(it, "grad", None)),
    "half and back": lambda model: model.half().float(),
    "double": lambda model: model.double().float(),
    "share_memory": lambda model: model.share_memory(),
    "queue": through_a_queue,
    "parameters' data": with_each(lambda it: setattr(it, "data", it.data.clone())),
    "to_empty": lambda model: (
        state := copy.deepcopy(model.state_dict()), model.to_empty(device="cpu"), model.load_state_dict(state)
    ),
    "loaded": load,
    "parametrized": lambda model: torch.nn.utils.parametrize.register_parametrization(
        model.module[0], "weight", torch.nn.Identity()
    ),
    "fork": in_a_fork,
}  # fmt: skip


def changed_gradients(rank, world_size, directory, kind):
    import torch.nn.utils.parametrize

    leave = connect(rank, world_size, directory, kind)
    wrong, kept, lengths = [], {}, {}
    for views, to_none in itertools.product({kind == KINDS[-1], False}, (False, True)):
        model = DistributedDataParallel(small(), gradient_as_bucket_view=views)
        parameters = list(model.parameters())
        model(batch(rank, 0)).square().mean().backward()
        for name, change in CHANGES.items():
            change(model)
            for step in (1, 2):
                model.zero_grad(set_to_none=to_none)
                model(batch(rank, step)).square().mean().backward()
                mean = mean_of(
                    world_size, small, lambda it, of, step=step: it(batch(of, step)).square().mean().backward()
                )  # fmt: skip
                near = {"rtol": 1e-2, "atol": 1e-3}  # half
                wrong += [(views, to_none, name, it) for it in differing(parameters, mean, **near)]
        gradient = model.module[0].bias.grad
        saved = io.BytesIO()
        torch.save(gradient, saved)
        lengths[views] = saved.tell() < 4096
        if to_none:
            model.zero_grad()
            before = gradient.tolist()
            model(batch(rank, 3)).square().mean().backward()
            kept[views] = gradient.tolist() == before
        model.reducer.stop()
    leave()
    return wrong, kept[False], lengths


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_averaged_whatever_a_program_has_done_with_old_ones(kind):
    for wrong, is_kept, lengths in run(2, changed_gradients, kind):
        assert wrong == []
        assert is_kept, "a gradient of an earlier step was overwritten"
        assert all(lengths.values()), "a gradient was saved together with others"


class Apart:
    """A class that nobody knows."""

    __slots__ = ("value",)

    def __init__(self, value):
        self.value = value


class Field(torch.nn.Module):
    """What it computes can be had in several ways."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        layers = torch.nn.Linear(3, 6), torch.nn.Tanh(), torch.nn.Linear(6, 1, bias=False)
        self.layers = torch.nn.Sequential(*layers).double()

    def forward(self, x, how="returned"):
        self.kept = self.layers(x)
        if how == "returned":
            return self.kept
        if how == "inside":
            self.kept.square().mean().backward()
        return Apart({"y": [self.kept]}) if how == "apart" else None


def points(rank, step):
    return batch(rank, step).double()


def inner(model):
    return getattr(model, "module", model)


def force(model, x):
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return (slope - 1).square().mean()


def by_forces(model, x):
    force(model, x).backward()


def penalty_apart(model, x):
    model(x).mean().backward()
    force(model, x).backward()


def penalty_first(model, x):
    force(model, x).backward()
    model(x).mean().backward()


def penalty_of_one_forward(model, x):
    x = x.clone().requires_grad_()
    y = model(x).square().sum()
    (slope,) = torch.autograd.grad(y, x, create_graph=True)
    y.backward(retain_graph=True)
    (slope - 1).square().mean().backward()


def kept(model, x):
    model(x, "none")
    inner(model).kept.square().mean().backward()


def kept_twice(model, x):
    model(x, "none")
    first = inner(model).kept
    model(2 * x, "none")
    first.square().mean().backward()
    inner(model).kept.square().mean().backward()


def by_a_hook(model, x):
    seen = []
    handle = inner(model).layers[1].register_forward_hook(lambda *them: seen.append(them[2]))
    y = model(x)
    handle.remove()
    (seen[0].square().mean() + 0 * y.sum()).backward(retain_graph=True)
    (seen[0].cos().mean() + y.detach().mean() + inner(model).layers[2].weight.sum()).backward()


def inside(model, x):
    model(x, "inside")


def apart(model, x):
    model(x, "apart").value["y"][0].square().mean().backward()


def without_sync(model, x):
    local = model.no_sync() if isinstance(model, DistributedDataParallel) else contextlib.nullcontext()
    with local:
        force(model, 2 * x).backward()
        model(x, "none")
        inner(model).kept.square().mean().backward()
    force(model, x).backward()


def with_graph(model, x):
    model(x).square().mean().backward(create_graph=True)


WAYS = (
    by_forces, penalty_apart, penalty_first, penalty_of_one_forward, kept, kept_twice, by_a_hook, inside, apart,
    without_sync, with_graph,
)  # fmt: skip


def unseen(rank, world_size, directory):
    leave = connect(rank, world_size, directory)
    wrong = []
    for options in ({}, {"find_unused_parameters": True}, {"gradient_as_bucket_view": True}):
        model = DistributedDataParallel(Field(), **options)
        for way, step in itertools.product(WAYS, (1, 2)):
            model.zero_grad(set_to_none=step == 1)
            way(model, points(rank, step))
            mean = mean_of(
                world_size, Field, lambda it, of, step=step, way=way: way(it, points(of, step))
            )
            wrong += [(options, way.__name__, it) for it in differing(model.parameters(), mean)]
        # What belongs to no forward of the wrapper stays on this rank.
        model.zero_grad()
        with torch.no_grad():
            for it in model.parameters():
                it.mul_(1)
        model(points(rank, 0)).sum().backward()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            for _ in range(2):
                model.module(points(rank, 0) * (1 + rank)).sum().backward()
                torch.autograd.grad(model(points(rank, 0)).sum(), list(model.parameters()))
        assert [str(it.message).split(":")[0] for it in said] == [
            "parameter layers.2.weight got a gradient that is not averaged",
            "torch.autograd.grad has returned this rank's own gradient of parameter layers.0.weight",
        ]
        model.reducer.stop()
    # The gradient of a penalty on averaged gradients.
    model = DistributedDataParallel(Field())
    model(points(rank, 1)).square().mean().backward(create_graph=True)
    first = [it.grad for it in model.parameters()]
    for it in model.parameters():
        it.grad = None
    sum(it.pow(3).sum() for it in first).backward()
    second = [it.grad for it in model.parameters()]
    alone = Field()
    loss = sum(alone(points(it, 1)).square().mean() for it in range(world_size)) / world_size
    grads = torch.autograd.grad(loss, list(alone.parameters()), create_graph=True)
    sum(it.pow(3).sum() for it in grads).backward()
    for ours, theirs in zip(second, alone.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs.grad)
    model.reducer.stop()
    never = DistributedDataParallel(Field())
    with pytest.raises(RuntimeError, match="forward of the wrapper has never been called"):
        never.module(points(rank, 1)).sum().backward()
    with never.no_sync():
        never.module(points(rank, 1)).sum().backward()
    part = DistributedDataParallel(never.module.layers)  # of which another wrapper is used
    part(points(rank, 1)).sum().backward()
    with never.no_sync():
        never.module(points(rank, 1)).sum().backward()
    never.reducer.stop()
    leave()
    return wrong


def test_no_gradient_passes_unseen():
    for wrong in run(2, unseen):
        assert wrong == []


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


class Odd(torch.nn.Module):
    """Some parameters take part if they are asked for; one is used twice, one is frozen."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.first = torch.nn.Linear(4, 4)
        self.second = torch.nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.extra = torch.nn.Linear(4, 4)
        self.frozen = torch.nn.Parameter(torch.ones(4), requires_grad=False)

    def forward(self, x, extra=True):
        x = self.second(self.first(x)) * self.frozen
        return self.extra(x) if extra else x


def gradients(model):
    return [None if it.grad is None else it.grad.tolist() for it in model.parameters()]


def accumulation(rank, world_size, directory):
    leave = connect(rank, world_size, directory)
    out = []
    for set_to_none, views in itertools.product((True, False), repeat=2):
        ours, theirs = Odd(), Odd()
        model = DistributedDataParallel(ours, gradient_as_bucket_view=views)
        for round_number in range(2):
            batches = torch.randn(world_size, 3, 5, 4, generator=torch.Generator().manual_seed(9))
            with model.no_sync():
                for batch in batches[rank, :2]:
                    model(batch).square().sum().backward()
            model(batches[rank, 2]).square().sum().backward()
            theirs(batches.reshape(-1, 4)).square().sum().div(world_size).backward()
            found = {it.grad.data_ptr() for it in ours.parameters() if it.requires_grad}
            places = {it.data_ptr() for it in model.reducer._buckets.places.tensors}
            close = all(
                torch.allclose(a.grad, b.grad, rtol=1e-4, atol=1e-5)
                for a, b in zip(ours.parameters(), theirs.parameters(), strict=True)
                if a.requires_grad
            )
            is_right = found == places if views else not found & places
            out.append((close, is_right, round_number))
            for module in (ours, theirs):
                module.zero_grad(set_to_none=set_to_none)
        model.reducer.stop()
    leave()
    return out


def test_gradients_add_up_without_sync_and_lie_where_they_are_wanted():
    for out in run(2, accumulation):
        assert all(close and is_right for close, is_right, _ in out), out


def two_backwards(rank, world_size, directory):
    leave = connect(rank, world_size, directory)
    model = DistributedDataParallel(torch.nn.Linear(2, 2, bias=False))
    with torch.no_grad():
        model.module.weight.fill_(1.0)
    x = torch.full((1, 2), rank + 1.0)
    outputs = model(x)
    outputs.sum().backward(retain_graph=True)
    outputs.sum().backward()
    twice = model.module.weight.grad.tolist()
    # A gradient that is only looked at is no step.
    y = x.clone().requires_grad_()
    (looked_at,) = torch.autograd.grad(model(y).sum(), y)
    # Nor is one that does not go through the wrapper.
    model.zero_grad()
    if rank == 0:
        model.module(x).sum().backward()
    only_here = None if model.module.weight.grad is None else model.module.weight.grad.tolist()
    model.zero_grad()
    # Several forwards, one backward.
    (model(x) + model(x)).sum().backward()
    both = model.module.weight.grad.tolist()
    model.reducer.stop()
    leave()
    return twice, looked_at.tolist(), only_here, both


def test_a_step_is_a_backward_through_the_outputs():
    for rank, (twice, looked_at, only_here, both) in enumerate(run(2, two_backwards)):
        assert twice == [[3.0, 3.0]] * 2 == both
        assert looked_at == [[2.0, 2.0]]
        assert only_here == ([[1.0, 1.0]] * 2 if rank == 0 else None)


def unused(rank, world_size, directory):
    leave = connect(rank, world_size, directory)
    x = torch.ones(2, 4)
    model = DistributedDataParallel(Odd())
    with pytest.raises(drumline.NotBroughtError) as raised:
        model(x, extra=rank == 0).sum().backward()
    model.zero_grad()
    model(x).sum().backward()  # goes on
    model.reducer.stop()
    tolerant = DistributedDataParallel(Odd(), find_unused_parameters=True)
    tolerant(x, extra=rank == 0).sum().backward()
    somewhere = gradients(tolerant)
    tolerant.zero_grad()
    tolerant(x, extra=False).sum().backward()
    nowhere = gradients(tolerant)[-2:]
    for it in tolerant.parameters():
        it.grad = torch.full_like(it, 2.0 + rank) if it.requires_grad else None
    tolerant(x, extra=False).sum().backward()
    kept = [it.grad.unique().tolist() for it in tolerant.module.extra.parameters()]
    tolerant.reducer.stop()
    leave()
    return str(raised.value), somewhere, nowhere, kept


def test_unused_parameters_are_named_or_averaged_with_zeros():
    first, second = run(2, unused)
    for text, *_ in (first, second):
        assert "rank 1 has not brought" in text and "`extra.weight`" in text, text
        assert "`extra.bias`" in text and "find_unused_parameters" in text, text
        assert "rank 0" not in text and "first" not in text, text
    assert first[1] == second[1] and first[1][-1] == [1.0] * 4
    for rank, (_, _, nowhere, kept) in enumerate((first, second)):
        assert nowhere == [None, None]
        assert kept == [[2.0 + rank]] * 2


class Checkpointed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.shared = torch.nn.Linear(4, 4)
        self.never = torch.nn.Linear(4, 4)

    def forward(self, x):
        from torch.utils.checkpoint import checkpoint

        for _ in range(2):
            x = checkpoint(self.shared, x, use_reentrant=True)
        return x


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
