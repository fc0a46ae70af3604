"""drumline's DistributedDataParallel has the arguments and attributes of torch's."""

from __future__ import annotations

import contextlib
import copy
import inspect
import pickle
import types
from pathlib import Path

import pytest
from ddp_models import Checkpointed, Odd, bits, connect, gradients, network
from ranks import run
from torch_versions import needs_backends, needs_torchrun

torch = pytest.importorskip("torch")
import ddp_cases  # noqa: E402
import ddp_method_cases  # noqa: E402, F401
import torch.distributed as dist  # noqa: E402
from torch.distributed.algorithms.join import Join  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402

from drumline import DistributedDataParallel, convert_sync_batchnorm  # noqa: E402

TorchDDP = torch.nn.parallel.DistributedDataParallel

PAGE = Path(__file__).parents[2] / "docs/reference/python-ddp.md"


def names(rank, world_size, directory):
    leave = connect(rank, world_size, directory, "gloo")
    ours, theirs = DistributedDataParallel(network()), TorchDDP(network())
    public = {name for name in dir(theirs) if not name.startswith("_")}
    out = public - set(dir(ours))
    leave()
    return out


def test_arguments_and_names_are_torchs():
    taken = [it.name for it in inspect.signature(DistributedDataParallel).parameters.values()]
    theirs = [it.name for it in inspect.signature(TorchDDP).parameters.values()]
    # Older ones lack some.
    assert [name for name in taken if name in theirs] == theirs
    [missing] = run(1, names)
    page = PAGE.read_text()
    assert [name for name in missing if f"`{name}`" not in page] == []


def all_cases(rank, world_size, directory):
    out = []
    for kind in ("gloo", "drumline"):
        leave = connect(rank, world_size, directory, kind)
        mesh, grid = init_device_mesh("cpu", (world_size,)), init_device_mesh("cpu", (1, world_size))
        at = ddp_cases.At(rank, world_size, dist.new_group([0, 1]), mesh, grid)
        out += [ddp_cases.outcomes(wrap, at) for wrap in (TorchDDP, DistributedDataParallel)]
        dist.barrier()
        leave()
    return out


@needs_torchrun
@pytest.mark.skipif(torch.cuda.is_available(), reason="the cases are for a machine without GPUs")
@pytest.mark.parametrize("world_size", [2, 3])
def test_it_differs_from_torchs_class_in_the_cases_of_the_page_and_in_no_other(world_size):
    section = PAGE.read_text().split("## Case by case")[1].split("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")][1:]
    wanted = ddp_cases.wanted()
    assert dict(rows) == wanted
    ranks = run(world_size, all_cases)
    gloo, ours, on_drumline, ours_there = ([rank[way] for rank in ranks] for way in range(4))
    told = []
    for name in ddp_cases.CASES:
        torchs, drumlines = [it[name] for it in gloo], [it[name] for it in ours]
        if ddp_cases.near(torchs, drumlines) != (name not in wanted):
            told.append(f"{name}: torch's {torchs}, drumline's {drumlines}")
        for way, others, is_same in (
            ("torch's", [it[name] for it in on_drumline], name not in ddp_cases.ON_GLOO_ALONE),
            ("drumline's", [it[name] for it in ours_there], True),
        ):
            on_gloo = torchs if way == "torch's" else drumlines
            if ddp_cases.near(on_gloo, others) != is_same:
                told.append(f"{name}: {way}, on gloo {on_gloo}, on drumline {others}")
    assert not told, "\n".join(told)


def train_unevenly(model, optimizer, rank, context):
    with context:
        for step in range(2 + 2 * rank):
            x = torch.randn(4, 12, generator=torch.Generator().manual_seed(10 * rank + step))
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    return torch.cat([it.detach().reshape(-1) for it in model.parameters()])


def joins(rank, world_size, directory, kind):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    leave = connect(rank, world_size, directory, kind)
    out = []
    for by_initial in (True, False):
        options = {"lr": 0.1, "momentum": 0.9}
        model = DistributedDataParallel(network())
        # A part of the optimizer is on the rank that ends first.
        zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, **options)
        both = Join([model, zero], divide_by_initial_world_size=by_initial)
        ours = train_unevenly(model, zero, rank, both)
        model(torch.ones(2, 12)).sum().backward()  # ranks are not counted any more
        model.reducer.stop()
        # Under torch's Join, a rank that has ended steps with its last gradients; so, one optimizer.
        reference = TorchDDP(network())
        whole = torch.optim.SGD(reference.parameters(), **options)
        context = reference.join(divide_by_initial_world_size=by_initial)
        theirs = train_unevenly(reference, whole, rank, context)
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
        out.append(ours.tolist())
    # Two models, of which the second has most to do.
    first, second = DistributedDataParallel(network()), DistributedDataParallel(Odd())
    with Join([first, second]):
        for _ in range(1 + rank):
            first(torch.ones(2, 12)).sum().backward()
            second(torch.ones(2, 4)).sum().backward()
    out.append((bits(first), bits(second)))
    with Join([first], enable=False):
        first(torch.ones(2, 12)).sum().backward()
    with pytest.raises(RuntimeError, match="exhausted") as raised:
        with Join([first], throw_on_early_termination=True):
            for _ in range(1 + rank):
                first(torch.ones(2, 12)).sum().backward()
    leave()
    return out, str(raised.value)


@pytest.mark.parametrize("kind", ["gloo", pytest.param("drumline", marks=needs_backends)])
def test_torchs_join_takes_models_and_optimizers(kind, torch_base):
    (first, early), (second, late) = run(2, joins, kind)
    assert first == second
    assert first[0] != first[1]
    assert "Rank 0" in early and "at least one rank" in late


class Uneven(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4)
        self.last, self.spare = torch.nn.Linear(4, 1), torch.nn.Linear(4, 1)

    def forward(self, x, spares):
        hidden = self.norm(self.first(x)).tanh()
        return self.last(hidden) + (self.spare(hidden) if spares else 0)


def summed(state, bucket):
    return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda it: it.value()[0])


# Batches of the ranks, and after how many a rank steps; then options. A rank that ends between two steps still adds
# what it has.
UNEVEN = [
    ([1, 4, 2], 1, {}),
    ([3, 5, 4], 2, {"find_unused_parameters": True}),
    ([3, 5, 4], 2, {"by_initial": False, "find_unused_parameters": True}),
    ([5, 0, 6], 3, {"by_initial": False, "static_graph": True, "how": "Join"}),
    ([2, 6, 6], 2, {"how": "Join", "find_unused_parameters": True}),
    ([2, 2, 2], 1, {"by_initial": False}),
    ([2, 3, 1], 1, {"by_initial": False, "hook": True, "find_unused_parameters": True}),
    ([4, 4, 6], 2, {"forward_sync_buffers": False, "find_unused_parameters": True}),
]


def a_batch(rank, index):
    return torch.randn(6, 3, generator=torch.Generator().manual_seed(100 * rank + index))


def spares(options, rank, index):
    return "find_unused_parameters" in options and rank == 0 and index % 2 == 0


def uneven_ranks(rank, counts, every, options):
    case, options = options, dict(options)
    how, hook, by_initial = (options.pop(name, None) for name in ("how", "hook", "by_initial"))
    options.setdefault("find_unused_parameters", "static_graph" not in options)
    model = DistributedDataParallel(Uneven(), **options)
    if hook:
        model.register_comm_hook(None, summed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    divide = {"divide_by_initial_world_size": by_initial is not False}
    with Join([model], **divide) if how == "Join" else model.join(**divide):
        for index in range(counts[rank]):
            steps = (index + 1) % every == 0
            with contextlib.nullcontext() if steps else model.no_sync():
                model(a_batch(rank, index), spares(case, rank, index)).square().mean().backward()
            if steps:
                optimizer.step()
                optimizer.zero_grad()
    assert model.reducer.scale is None
    return [it.detach().clone() for it in model.state_dict().values()]


def uneven_alone(counts, every, options):
    """The same in one process: sums of what the ranks add, and the statistics of each rank."""
    model, world_size = Uneven(), len(counts)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    statistics = [[it.clone() for it in model.buffers()] for _ in counts]
    adding = set()
    for index in range(max(counts)):
        active = [rank for rank in range(world_size) if index < counts[rank]]
        steps, adding = (index + 1) % every == 0, adding | set(active)
        if steps and options.get("forward_sync_buffers", True):
            statistics = [[it.clone() for it in statistics[active[-1]]] for _ in counts]
        for rank in active:
            for buffer, own in zip(model.buffers(), statistics[rank], strict=True):
                buffer.data = own
            model(a_batch(rank, index), spares(options, rank, index)).square().mean().backward()
        if steps:
            divisor = world_size if options.get("by_initial", True) else len(adding)
            for it in model.parameters():
                if it.grad is not None:
                    it.grad /= 1 if "hook" in options else divisor
            optimizer.step()
            optimizer.zero_grad()
            adding = set()
    longest = max(rank for rank in range(world_size) if counts[rank] == max(counts))
    for buffer, own in zip(model.buffers(), statistics[longest], strict=True):
        buffer.data = own
    return list(model.state_dict().values())


def uneven_kinds(rank, world_size, directory):
    leave = connect(rank, world_size, directory)
    for counts, every, options in UNEVEN:
        got, want = uneven_ranks(rank, counts, every, options), uneven_alone(counts, every, options)
        plain = Uneven()
        for name, ours, whole in zip(plain.state_dict(), got, want, strict=True):
            # Without buffers in common each rank keeps its own.
            if name not in dict(plain.named_buffers()) or options.get("forward_sync_buffers", True):
                torch.testing.assert_close(ours, whole, msg=lambda text: f"{options} {name}: {text}")  # noqa: B023
    # What cannot go well is an error on all ranks, and the model works on.
    first, second = DistributedDataParallel(Uneven(), find_unused_parameters=True), DistributedDataParallel(network())
    x, y = a_batch(rank, 0), torch.ones(2, 12)
    with pytest.raises(RuntimeError, match=r"ranks \[1, 2\] have a backward .*ranks \[0\] do not"), first.join():
        with first.no_sync() if rank == 0 else contextlib.nullcontext():
            first(x, False).sum().backward()
    with pytest.raises(RuntimeError, match=r"Join\(\[first, second\]\)"), first.join():
        with second.join():
            for _ in range(1 + rank):
                first(x, False).sum().backward()
                second(y).sum().backward()
    normalised = DistributedDataParallel(convert_sync_batchnorm(network()))
    with pytest.raises(RuntimeError, match="ranks .* have no data left.*SyncBatchNorm"), normalised.join():
        for _ in range(1 + rank):
            normalised(y + rank).sum().backward()
    context = second.join(throw_on_early_termination=True)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"ranks \[0\] have no data left"), context:
            for _ in range(1 + bool(rank)):
                second(y).sum().backward()
    for model in (first, second, normalised):
        model.zero_grad()
        model(*((x, False) if model is first else (y + rank,))).sum().backward()
    leave()
    return gradients(second)


def test_ranks_that_end_early_add_what_they_have_and_make_the_calls_of_the_others():
    first, second, third = run(3, uneven_kinds)
    assert first == second == third


def joins_without_torch(rank, world_size, directory):
    leave = connect(rank, world_size, directory, "plain")
    model = DistributedDataParallel(network())
    with pytest.raises(TypeError, match=r"model\.join\(\)"):
        Join([model])
    with model.join():
        for _ in range(1 + rank):
            model(torch.ones(2, 12)).sum().backward()
    leave()
    return bits(model)


def test_join_without_a_group_of_torchs_names_what_there_is():
    first, second = run(2, joins_without_torch)
    assert first == second


class Precise(torch.nn.Module):
    """Says in which type it runs. Two names for one weight, a buffer of each kind, a frozen part."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.first = torch.nn.Linear(8, 8)
        self.second = torch.nn.Linear(8, 8)
        self.second.weight = self.first.weight
        self.frozen = torch.nn.Parameter(torch.ones(8), requires_grad=False)
        self.idle = torch.nn.Linear(8, 8)
        self.register_buffer("scale", torch.ones(8))
        self.register_buffer("count", torch.zeros(1, dtype=torch.int64))

    def forward(self, x):
        self.seen = x.dtype, self.first.weight.dtype, self.second.weight.dtype, self.scale.dtype
        return self.second(self.first(x).relu()) * self.frozen


def in_short(rank, world_size, directory):
    leave = connect(rank, world_size, directory, "gloo")
    batches = torch.randn(world_size, 5, 8, generator=torch.Generator().manual_seed(4))
    out = []
    for reduced, buffers, options in (
        (None, torch.bfloat16, {"find_unused_parameters": True}),
        (torch.float32, None, {"static_graph": True}),
        (torch.float16, None, {"find_unused_parameters": True}),
    ):
        config = types.SimpleNamespace(
            param_dtype=torch.bfloat16, reduce_dtype=reduced, buffer_dtype=buffers
        )
        module = Precise()
        model = DistributedDataParallel(module, mixed_precision=config, **options)
        outputs = model(batches[rank])
        assert outputs.dtype is torch.bfloat16
        outputs.float().square().sum().backward()
        assert all(it.dtype is torch.float32 for it in module.parameters())
        assert module.count.dtype is torch.int64
        # Each rank's gradients, on casts of the parameters; then their average in its type.
        summed = [0.0] * 4
        for batch in batches:
            plain = Precise().to(torch.bfloat16)
            plain(batch.to(torch.bfloat16)).float().square().sum().backward()
            several = [plain.first.weight, plain.first.bias, plain.second.bias]
            for index, parameter in enumerate(several):
                summed[index] = summed[index] + parameter.grad.float()
        ours = [module.first.weight, module.first.bias, module.second.bias]
        for parameter, whole in zip(ours, summed, strict=False):
            assert parameter.grad.dtype is torch.float32
            mean = (whole / world_size).to(reduced or torch.bfloat16).float()
            torch.testing.assert_close(parameter.grad, mean)
        assert module.idle.weight.grad is None
        out.append((module.seen, gradients(model)))
        model.reducer.stop()
    with pytest.raises(TypeError, match="param_dtype.* str"):
        DistributedDataParallel(Precise(), mixed_precision="bf16")
    leave()
    return out


def test_mixed_precision_runs_on_casts_and_reduces_in_its_type():
    first, second = run(2, in_short)
    assert first == second
    short, whole = torch.bfloat16, torch.float32
    assert [seen for seen, _ in first] == [(short,) * 4] + [(short, short, short, whole)] * 2


def logged(rank, world_size, directory):
    leave = connect(rank, world_size, directory, "gloo")
    tables = []
    for wrapper in (DistributedDataParallel, TorchDDP):
        model = wrapper(Odd(), find_unused_parameters=True)
        for _ in range(3):
            model(torch.ones(2, 4), extra=False).sum().backward()
        model._set_ddp_runtime_logging_sample_rate(1)
        tables.append(model._get_ddp_logging_data())
        with pytest.raises(ValueError):
            model._set_ddp_runtime_logging_sample_rate(0)
    # Else torch's class would free the group, and wait for a thread of gloo that waits for the interpreter.
    del model
    leave()
    return tables


def test_logging_data_has_torchs_names_and_values():
    for ours, theirs in run(2, logged):
        only_if_set = {"comm_hook", "static_graph", "join_uneven_inputs"}
        assert ours.keys() - theirs.keys() <= only_if_set
        for name in ours.keys() & theirs.keys():
            value = ours[name]
            assert type(value) is type(theirs[name]), name
            # torch counts forwards, has buckets of its own length, and once counted twice.
            others = "iteration", "bucket_cap_bytes", "unused_parameter_size"
            if not name.endswith("_time") and name not in others:
                assert value == theirs[name], name
        assert ours["iteration"] == 3 and ours["unused_parameter_size"] == 4 * (16 + 4)
        parts = "forward_compute", "backward_compute", "backward_comm"
        assert all(ours[f"{prefix}{it}_time"] > 0 for it in parts for prefix in ("", "avg_"))
        overlap = ours["backward_compute_comm_overlap_time"]
        assert 0 <= overlap <= min(ours["backward_compute_time"], ours["backward_comm_time"])


def set_later(rank, world_size, directory):
    leave = connect(rank, world_size, directory, "gloo")
    x = torch.full((3, 4), rank + 1.0, requires_grad=True)
    seen = []
    for later in (False, True):
        model = DistributedDataParallel(Checkpointed(), static_graph=not later)
        if later:
            model._set_static_graph()
            with pytest.warns(UserWarning, match="static_graph"):
                model._set_static_graph()
        for _ in range(2):
            model.zero_grad()
            model(x).sum().backward()
            seen.append(gradients(model))
    leave()
    return seen


def test_a_graph_may_be_said_to_be_static_later():
    first, second = run(2, set_later)
    assert first == second and first[:2] == first[2:] and first[0][0] is not None


def evaluated(model, context=torch.no_grad):
    model.eval()
    with context():
        out = model(torch.linspace(-1, 1, 24).reshape(2, 12).to(next(model.parameters()))).tolist()
    model.train()
    return out


def evaluations(rank, world_size, directory):
    leave = connect(rank, world_size, directory)
    module = network()
    module.register_buffer("phase", torch.exp(1j * torch.arange(3)).conj())
    module.register_buffer("mask", torch.ones(2, 3, dtype=torch.bool).t())
    module.register_buffer("none", torch.empty(0, 2))
    model = DistributedDataParallel(module)
    x = torch.randn(8, 12, generator=torch.Generator().manual_seed(rank)) * (1 + rank)
    statistics, out = model.module[1], []
    model(x).sum().backward()
    if rank == 0:
        # Nobody else is asked.
        evaluated(model)
    for context in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        model(x).sum().backward()
        out.append(evaluated(model, context))
    # A forward without a backward; other types and places.
    model(x)
    out.append(evaluated(model))
    model(x).sum().backward()
    model.half().float()
    out.append(evaluated(model))
    model(x).sum().backward()
    model.module.double()
    out.append(evaluated(model))
    model.float()
    # A copy, on one rank too, and what a model is saved as.
    model(x).sum().backward()
    out.append(evaluated(copy.deepcopy(model)))
    # What was set on purpose stays.
    model(x).sum().backward()
    statistics.running_mean.fill_(rank)
    evaluated(model)
    kept = statistics.running_mean.unique().tolist()
    # Each rank for itself.
    with model.no_sync():
        model(x)
    own = evaluated(model)
    model.forward_sync_buffers = False
    model(x).sum().backward()
    own_too = evaluated(model)
    leave()
    return out, kept, own, own_too


def test_all_ranks_evaluate_the_model_of_rank_0_without_a_call():
    ranks = run(3, evaluations)
    for rank, (out, kept, own, own_too) in enumerate(ranks):
        assert out == ranks[0][0]
        assert kept == [rank]
        assert rank == 0 or (own != ranks[0][2] and own_too != ranks[0][3])


def copies(rank, world_size, directory):
    leave = connect(rank, world_size, directory)
    model = DistributedDataParallel(network(), static_graph=True)
    x = torch.full((4, 12), rank + 1.0)
    x[0] = 0
    model.require_manual_backward_finalization = True
    model(x).square().sum().backward()
    model.finalize_backward()
    # One rank alone: for an average of weights, or a checkpoint.
    if rank == 1:
        average = copy.deepcopy(model).requires_grad_(False)
        assert torch.equal(average(x), average.module(x))
        assert evaluated(pickle.loads(pickle.dumps(model))) == evaluated(copy.deepcopy(model))
        assert average.state_dict().keys() == model.state_dict().keys()
    pair = dist.new_group([0, 1])
    if rank < 2:
        with pytest.raises(RuntimeError, match="group of the whole job"):
            copy.deepcopy(DistributedDataParallel(network(), process_group=pair))
    out = []
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        again.zero_grad()
        again(x).square().sum().backward()
        again.finalize_backward()
        out.append(gradients(again))
    saved = pickle.dumps(model)
    leave()
    # Where there is no group, a copy is a module.
    evaluated(pickle.loads(saved))
    return out


def test_a_copy_is_made_without_the_other_ranks():
    ranks = run(3, copies)
    assert all(out == ranks[0] for out in ranks)
    assert ranks[0][0] == ranks[0][1]


def by_hand(rank, world_size, directory):
    leave = connect(rank, world_size, directory, "gloo")
    model = DistributedDataParallel(torch.nn.Linear(2, 2, bias=False))
    x = torch.full((1, 2), rank + 1.0)
    with pytest.raises(RuntimeError, match="by itself"):
        model.finalize_backward()
    model.require_manual_backward_finalization = True
    with pytest.raises(RuntimeError, match="nothing to wait for"):
        model.finalize_backward()
    for _ in range(2):
        model.zero_grad()
        model(x).sum().backward()
        assert model.should_finalize_after_backward
        model.finalize_backward()
    averaged = model.module.weight.grad.unique().tolist()
    model(x).sum().backward()
    with pytest.raises(RuntimeError, match=r"nobody has waited .*finalize_backward\(\)"):
        model(x)
    model.finalize_backward()
    model._check_reducer_finalized()
    leave()
    return averaged


def test_a_backward_may_be_finalized_by_hand():
    assert run(2, by_hand) == [[1.5]] * 2


def spread(rank, world_size, directory):
    try:
        from torch.distributed.tensor import distribute_tensor
    except ImportError:  # torch 2.4
        from torch.distributed._tensor import distribute_tensor

    leave = connect(rank, world_size, directory, "gloo")
    module = torch.nn.Linear(2, 2)
    mesh = init_device_mesh("cpu", (world_size,))
    module.weight = torch.nn.Parameter(distribute_tensor(module.weight.detach(), mesh))
    with pytest.raises(TypeError, match="weight is a DTensor.*FSDP2"):
        DistributedDataParallel(module)
    leave()


def test_parameters_that_lie_on_several_ranks_are_refused_by_name():
    run(1, spread)


def hooks_and_optimizers(rank, world_size, directory):
    leave = connect(rank, world_size, directory, "gloo")
    x = torch.full((4, 12), rank + 1.0)
    seen = []
    for kind in (dist.BuiltinCommHookType.ALLREDUCE, dist.BuiltinCommHookType.FP16_COMPRESS):
        model = DistributedDataParallel(network())
        model._register_builtin_comm_hook(kind)
        model(x).sum().backward()
        seen.append((gradients(model), model._get_ddp_logging_data()["comm_hook"]))
    with pytest.raises(NotImplementedError, match="overlap_with_ddp"):
        assert model._has_rebuilt_buckets
    with pytest.raises(NotImplementedError, match="call step"):
        model._register_fused_optim(torch.optim.SGD, lr=0.1)
    from torch.distributed.optim import _apply_optimizer_in_backward

    eager = network()
    _apply_optimizer_in_backward(torch.optim.SGD, eager.parameters(), {"lr": 0.1})
    with pytest.raises(NotImplementedError, match="parameter 0.weight: .*not averaged yet"):
        DistributedDataParallel(eager)(x)
    leave()
    return seen


def test_hooks_of_cpp_and_optimizers_that_would_step_too_early():
    first, second = run(2, hooks_and_optimizers)
    assert first == second
    (exact, _), (short, name) = first
    assert exact != short and "fp16" in name.lower()
    for one, other in zip(exact, short, strict=True):
        torch.testing.assert_close(torch.tensor(one), torch.tensor(other), rtol=1e-2, atol=1e-2)
