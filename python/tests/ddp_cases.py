"""What a program may do with a DistributedDataParallel, one case each: options, methods, misuse.

A case gets a class, torch's or drumline's, and where it runs. It returns what it has seen, in lists and numbers, or
raises. A docstring says how drumline's differs on purpose, and why; without one both do the same. The page
docs/reference/python-ddp.md has these texts, case by case.
"""

from __future__ import annotations

import dataclasses
import types
import unittest.mock
import warnings
from typing import Any

import torch
import torch.distributed as dist


@dataclasses.dataclass
class At:
    """This rank, and what all cases share."""

    rank: int
    world_size: int
    pair: Any
    mesh: Any
    grid: Any


CASES: dict[str, Any] = {}


def case(function):
    CASES[function.__name__.replace("_", " ")] = function
    return function


def line():
    """Two weights, 1 at the beginning."""
    model = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    return model


def layers():
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))


def normal():
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1))


class Maybe(torch.nn.Module):
    """Has a layer that a forward may leave out."""

    def __init__(self):
        super().__init__()
        self.always, self.maybe = line(), line()

    def forward(self, x, uses_all):
        return self.always(x) + (self.maybe(x) if uses_all else 0)


class Counting(torch.nn.Module):
    """A buffer that forward changes."""

    def __init__(self, at):
        super().__init__()
        self.layer = line()
        self.register_buffer("count", torch.full((1,), 10.0 * at.rank))

    def forward(self, x):
        self.count += 1
        return self.layer(x)


def batch(at, rows=4):
    return torch.randn(rows, 2, generator=torch.Generator().manual_seed(at.rank))


def step(model, at, *args):
    model(batch(at), *args).square().mean().backward()
    return grads(model)


def grads(model):
    return [None if it.grad is None else it.grad.float().flatten().tolist() for it in model.parameters()]


def state(model):
    return {name: it.float().flatten().tolist() for name, it in model.state_dict().items()}


def evaluated(model, at):
    model.eval()
    with torch.no_grad():
        out = model(torch.ones(3, 2)).flatten().tolist()
    model.train()
    return out


def count(model):
    return model.module.count.item()


def raised(call, *args, **kwargs):
    try:
        call(*args, **kwargs)
    except Exception as error:
        return type(error).__name__
    return "nothing"


def told(call, *args, **kwargs):
    with warnings.catch_warnings(record=True) as list_of_them:
        warnings.simplefilter("always")
        call(*args, **kwargs)
    return [it.category.__name__ for it in list_of_them]


# Options.


@case
def plain(wrap, at):
    model = wrap(layers())
    return [step(model, at), step(model, at), list(state(model)), len(list(model.parameters()))]


@case
def device_ids_on_a_machine_without_GPUs(wrap, at):
    """torch's raises. Here a program for GPUs runs on the CPU, and a warning says so."""
    return step(wrap(layers(), device_ids=[0], output_device=0), at)


@case
def several_device_ids(wrap, at):
    wrap(layers(), device_ids=[0, 1])


@case
def no_device_ids(wrap, at):
    return step(wrap(layers(), device_ids=[]), at)


@case
def device_ids_of_the_CPU(wrap, at):
    """torch's raises. Here it is taken, since the module is there."""
    return step(wrap(layers(), device_ids=[torch.device("cpu")]), at)


@case
def attributes(wrap, at):
    model = wrap(layers(), dim=1, find_unused_parameters=True, gradient_as_bucket_view=True)
    names = (
        "device device_ids device_type dim output_device is_multi_device_module find_unused_parameters "
        "gradient_as_bucket_view static_graph require_backward_grad_sync broadcast_buffers forward_sync_buffers "
        "mixed_precision parameters_to_ignore require_manual_backward_finalization should_finalize_after_backward "
        "training"
    )
    values = {name: str(getattr(model, name)) for name in names.split()}
    return [values, model.process_group is dist.group.WORLD, type(model.module).__name__, hasattr(model, "device_mesh")]


def _buffers(wrap, at, **options):
    model = wrap(Counting(at), **options)
    seen = [count(model)]
    model.module.count.fill_(20.0 + at.rank)
    step(model, at)
    return [*seen, count(model), model.broadcast_buffers]


@case
def buffers(wrap, at):
    return _buffers(wrap, at)


@case
def broadcast_buffers_off(wrap, at):
    return _buffers(wrap, at, broadcast_buffers=False)


@case
def forward_sync_buffers_off(wrap, at):
    return _buffers(wrap, at, forward_sync_buffers=False)


@case
def forward_sync_buffers_beside_broadcast_buffers(wrap, at):
    return _buffers(wrap, at, forward_sync_buffers=True, broadcast_buffers=False)


@case
def warnings_of_old_arguments(wrap, at):
    """torch's warns of `broadcast_buffers` and `check_reduction`. Here both stay."""
    options = ({"broadcast_buffers": True}, {"check_reduction": True})
    return [told(wrap, layers(), **it) for it in options]


@case
def init_sync_off(wrap, at):
    module = line()
    module.weight.data.fill_(at.rank)
    model = wrap(module, init_sync=False)
    seen = module.weight.tolist()
    return seen, step(model, at)


@case
def init_sync(wrap, at):
    module = layers()
    module[0].weight.data.fill_(at.rank)
    return state(wrap(module))


@case
def process_group(wrap, at):
    return step(wrap(layers(), process_group=at.pair), at) if at.rank < 2 else None


@case
def process_group_that_is_none(wrap, at):
    wrap(layers(), process_group="gloo")


@case
def device_mesh(wrap, at):
    model = wrap(layers(), device_mesh=at.mesh)
    return step(model, at), model.device_mesh is at.mesh


@case
def device_mesh_beside_a_group(wrap, at):
    wrap(layers(), device_mesh=at.mesh, process_group=dist.group.WORLD)


@case
def device_mesh_of_two_dimensions(wrap, at):
    wrap(layers(), device_mesh=at.grid)


@case
def bucket_cap(wrap, at):
    return [step(wrap(layers(), **it), at) for it in ({"bucket_cap_mb": 1e-5}, {"bucket_cap_mb_list": [1, 2]})]


@case
def bucket_cap_below_0(wrap, at):
    """torch's takes it. Here an error says what a cap may be."""
    return step(wrap(layers(), bucket_cap_mb=-1), at)


@case
def find_unused_parameters(wrap, at):
    model = wrap(Maybe(), find_unused_parameters=True)
    seen = [step(model, at, at.rank == 0), step(model, at, False)]
    model.zero_grad()
    return [*seen, step(model, at, False)]


@case
def outputs_of_many_kinds(wrap, at):
    class Kinds(Maybe):
        def forward(self, x, as_what):
            y = super().forward(x, False)
            return {"dict": {"y": [y]}, "tuple": (y, None), "object": types.SimpleNamespace(y=y)}[as_what]

    model, seen = wrap(Kinds(), find_unused_parameters=True), []
    for what in ("dict", "tuple"):
        y = model(batch(at), what)
        (y["y"][0] if what == "dict" else y[0]).sum().backward()
        seen.append(grads(model))
    return seen


@case
def an_unused_parameter(wrap, at):
    """torch's raises in the next forward. Here the backward raises on all ranks and names it, and the next step
    works."""
    model = wrap(Maybe())
    return raised(step, model, at, False), raised(step, model, at, True)


@case
def gradient_as_bucket_view(wrap, at):
    model = wrap(layers(), gradient_as_bucket_view=True)
    first = step(model, at)
    model.zero_grad(set_to_none=False)
    return first, step(model, at)


@case
def static_graph(wrap, at):
    model = wrap(Maybe(), static_graph=True)
    return [step(model, at, False) for _ in range(3)]


@case
def static_graph_beside_find_unused_parameters(wrap, at):
    model = wrap(Maybe(), static_graph=True, find_unused_parameters=True)
    return [step(model, at, False) for _ in range(2)]


@case
def static_graph_set_later(wrap, at):
    model = wrap(layers())
    model._set_static_graph()
    return step(model, at), told(model._set_static_graph), model.static_graph


@case
def static_graph_set_after_a_step(wrap, at):
    """torch's raises. Here gradients may move to other buckets between any two steps."""
    model = wrap(layers())
    step(model, at)
    model._set_static_graph()


@case
def delayed_parameters(wrap, at):
    module = layers()
    model = wrap(
        module,
        delay_all_reduce_named_params=[("2.weight", module[2].weight)],
        param_to_hook_all_reduce=module[0].weight,
    )
    # torch's begins an all_reduce of these gradients, and nothing waits for its end.
    begun, all_reduce = [], dist.all_reduce

    def begin(*args, **options):
        begun.append(all_reduce(*args, **options))
        return begun[-1]

    with unittest.mock.patch.object(dist, "all_reduce", begin):
        step(model, at)
    for work in begun:
        work.wait()
    return grads(model)


@case
def delayed_parameters_without_a_hook(wrap, at):
    module = layers()
    wrap(module, delay_all_reduce_named_params=[("0.weight", module[0].weight)])


@case
def delayed_parameters_of_another_module(wrap, at):
    """torch's takes them. Here an error names what the module lacks."""
    module, other = layers(), line()
    wrap(
        module,
        delay_all_reduce_named_params=[("7.weight", other.weight)],
        param_to_hook_all_reduce=module[0].weight,
    )


@case
def mixed_precision(wrap, at):
    """torch's raises on a CPU, which has no streams."""
    config = torch.nn.parallel.distributed._MixedPrecision(param_dtype=torch.bfloat16)
    return step(wrap(layers(), mixed_precision=config), at)


@case
def options_that_change_no_value(wrap, at):
    options = ("skip_all_reduce_unused_params", "batched_grad_copy", "lazy_bucket_allocation")
    return [step(wrap(layers(), find_unused_parameters=True, **{it: True}), at) for it in options]


@case
def nothing_to_train(wrap, at):
    wrap(layers().requires_grad_(False))


@case
def no_module(wrap, at):
    """torch's raises AttributeError. Here TypeError says what was passed."""
    wrap("model")


@case
def a_lazy_module(wrap, at):
    """torch's raises RuntimeError. Here it is TypeError, as in HaiScale."""
    wrap(torch.nn.LazyLinear(1))


@case
def a_SyncBatchNorm_of_torch_on_the_CPU(wrap, at):
    step(wrap(torch.nn.SyncBatchNorm.convert_sync_batchnorm(normal())), at)


@case
def types_and_ties(wrap, at):
    seen = []
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        model = wrap(line().to(dtype))
        model(batch(at).to(dtype)).sum().backward()
        seen.append(grads(model))
    tied = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 2, bias=False))
    tied[1].weight = tied[0].weight
    torch.nn.init.eye_(tied[0].weight)
    tied.register_parameter("frozen", torch.nn.Parameter(torch.ones(1), requires_grad=False))
    return [*seen, step(wrap(tied), at)]


# Steps.


@case
def gradients_add_up(wrap, at):
    model = wrap(layers())
    return step(model, at), step(model, at)


@case
def no_sync(wrap, at):
    model = wrap(layers())
    with model.no_sync():
        own = step(model, at)
    return own, step(model, at), model.require_backward_grad_sync


@case
def a_forward_under_no_sync_and_its_backward_after(wrap, at):
    model = wrap(layers())
    with model.no_sync():
        y = model(batch(at))
    y.sum().backward()
    return grads(model)


@case
def a_forward_before_no_sync_and_its_backward_under_it(wrap, at):
    model = wrap(layers())
    y = model(batch(at))
    with model.no_sync():
        y.sum().backward()
    return grads(model)


@case
def buffers_under_no_sync(wrap, at):
    """torch's sends buffers before the first forward under `no_sync`. Here they come before the next forward that is
    averaged."""
    model, seen = wrap(Counting(at)), []
    step(model, at)
    for index in range(4):
        model.module.count.fill_(100 * at.rank + index)
        with model.no_sync() if index < 2 else torch.enable_grad():
            step(model, at)
        seen.append(count(model))
    return seen


@case
def two_forwards_and_one_backward(wrap, at):
    model = wrap(layers())
    (model(batch(at)) + model(batch(at))).sum().backward()
    return grads(model)


@case
def a_second_backward_through_the_same_outputs(wrap, at):
    """torch's does not average its gradients. Here every backward through the outputs is averaged."""
    model = wrap(line())
    y = model(batch(at))
    y.sum().backward(retain_graph=True)
    model.zero_grad()
    y.sum().backward()
    return grads(model)


@case
def a_backward_that_does_not_go_through_the_wrapper(wrap, at):
    """torch's leaves each rank its own gradients. Here an error says to call the wrapper."""
    model = wrap(layers())
    model.module(batch(at)).sum().backward()
    return grads(model)


@case
def a_forward_without_a_backward(wrap, at):
    model = wrap(layers())
    model(batch(at))
    return step(model, at)


@case
def a_gradient_of_the_input(wrap, at):
    model = wrap(layers())
    x = batch(at).requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x)
    return slope.tolist(), step(model, at)


@case
def a_loss_of_derivatives_alone(wrap, at):
    model = wrap(layers())
    x = batch(at).requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    (slope.square().sum() + 0 * sum(it.sum() for it in model.parameters())).backward()
    return grads(model)


@case
def a_model_cast_to_half_and_back(wrap, at):
    """torch's averages no more. Here nothing changes."""
    model = wrap(layers())
    step(model, at)
    model.half().float()
    model.zero_grad()
    return step(model, at)


@case
def complex_parameters(wrap, at):
    module = torch.nn.Linear(2, 1, bias=False, dtype=torch.complex64)
    torch.nn.init.constant_(module.weight, 1 + 2j)
    model = wrap(module)
    model(batch(at) * (1 + 1j)).real.square().sum().backward()
    return torch.view_as_real(module.weight.grad.resolve_conj()).flatten().tolist()


@case
def a_forward_that_raises(wrap, at):
    model = wrap(layers())
    return raised(model, torch.ones(2, 5)), step(model, at)


@case
def a_parameter_that_is_frozen_later(wrap, at):
    """torch's raises in the next forward. Here the backward raises, as for a parameter that is not used."""
    model = wrap(layers())
    step(model, at)
    model.module[0].weight.requires_grad_(False)
    model.zero_grad()
    return raised(step, model, at), raised(step, model, at)


@case
def a_parameter_that_is_added_later(wrap, at):
    """torch's does not average its gradient. Here an error names it."""
    model = wrap(layers())
    model.module.append(torch.nn.Linear(1, 1))
    torch.nn.init.ones_(model.module[3].weight)
    return step(model, at)


@case
def keyword_arguments_and_no_tensor(wrap, at):
    class Named(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = line()

        def forward(self, *, x, scale):
            return self.layer(x) * scale

    model = wrap(Named())
    model(x=batch(at), scale=2).sum().backward()
    return grads(model), raised(model, batch(at))


@case
def sparse_gradients(wrap, at):
    """torch's takes them. Here they are refused by name: use torch's class on the backend drumline."""
    model = wrap(torch.nn.Embedding(3, 2, sparse=True))
    model(torch.tensor([at.rank])).sum().backward()
    return model.module.weight.grad.to_dense().tolist()


@case
def evaluation_after_training(wrap, at):
    model, seen = wrap(normal()), []
    for _ in range(2):
        step(model, at)
        seen.append(state(model.module[1]))
        seen.append(evaluated(model, at))
        seen.append(state(model.module[1]))
    model(batch(at))
    return [*seen, evaluated(model, at)]


@case
def evaluation_on_rank_0_alone(wrap, at):
    """torch's sends buffers, which the other ranks take later or wait for. Here it sends nothing."""
    model = wrap(Counting(at))
    # torch's makes other calls in the second step, and would not survive one of one rank alone there.
    for _ in range(3):
        step(model, at)
    before = count(model)
    model.module.count.fill_(50.0)
    if at.rank == 0:
        with torch.no_grad():
            model(batch(at))
    step(model, at)
    return before, count(model)


@case
def train_and_eval(wrap, at):
    model = wrap(normal())
    return [model.eval() is model, model.module[1].training, model.train() is model, model.module[1].training]


def outcomes(wrap, at):
    """What each case has seen, or the type of what it has raised."""
    seen = {}
    for name, function in CASES.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                seen[name] = function(wrap, at)
            except Exception as error:
                seen[name] = f"raises {type(error).__name__}"
    return seen


def near(one, other):
    """Whether two outcomes are the same, but for roundings of short types."""
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other) < 2e-3 * (1 + abs(one))
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(near, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(near(it, other[name]) for name, it in one.items())
    return one == other


def wanted():
    """The cases in which drumline's class does something else, and why."""
    return {name: " ".join(it.__doc__.split()) for name, it in CASES.items() if it.__doc__}


ON_GLOO_ALONE = {"builtin comm hooks"}
"""Cases in which torch's class asserts that the group is one of C++."""
