"""The gradients of a drumline.DistributedDataParallel: which are averaged, where they lie, what is done with old ones."""

from __future__ import annotations

import contextlib
import copy
import io
import itertools
import os
import warnings

import pytest
from ddp_models import KINDS, Odd, batch, connect, differing, gradients, mean_of, small
from ranks import run

torch = pytest.importorskip("torch")

import drumline  # noqa: E402
from drumline import DistributedDataParallel  # noqa: E402


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


# Torch 2.4 tells no hook that a backward keeps its graph for a second one. There a warning names the gradient.
TELLS = hasattr(torch._C._autograd, "_get_current_graph_task_keep_graph")
WAYS = (
    by_forces, penalty_apart, penalty_first, penalty_of_one_forward, kept, kept_twice, inside, apart, without_sync,
    with_graph, *[by_a_hook] * TELLS,
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
