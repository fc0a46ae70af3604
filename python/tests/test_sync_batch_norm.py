"""drumline.SyncBatchNorm."""

from __future__ import annotations

import copy
import pickle

import pytest
from ddp_models import connect, gradients
from ranks import run, run_and_see

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
import torch.nn.utils.parametrize  # noqa: E402

from drumline import DistributedDataParallel, SyncBatchNorm, convert_sync_batchnorm  # noqa: E402

# Ranks have different numbers of images.
SIZES = [1, 4, 0]


def images(dtype=torch.float64):
    generator = torch.Generator().manual_seed(2)
    return torch.randn(sum(SIZES), 3, 4, 5, generator=generator, dtype=dtype) * 3 + 1


def network():
    torch.manual_seed(0)
    layers = [torch.nn.BatchNorm2d(3), torch.nn.Conv2d(3, 2, 1), torch.nn.BatchNorm2d(2, affine=False)]
    return torch.nn.Sequential(*layers).double()


def outcome(model, x):
    x = x.requires_grad_()
    y = model(x)
    (y.sin() * torch.arange(5.0)).sum().backward()
    statistics = [it.tolist() for name, it in model.named_buffers()]
    return y.tolist(), x.grad.tolist(), [it.grad.tolist() for it in model.parameters()], statistics


def normalise(rank, world_size, directory):
    leave = connect(rank, world_size, directory)
    model = convert_sync_batchnorm(network())
    assert [type(it) is SyncBatchNorm for it in model] == [True, False, True]
    own = images().split(SIZES)[rank].clone()
    out = outcome(model, own)
    leave()
    return out


def test_statistics_are_those_of_one_batch():
    y, grad_x, grads, statistics = outcome(network(), images())
    ranks = run(3, normalise)
    for got in ranks:
        assert got[3] == ranks[0][3], "statistics differ in bits"
    for a, b in zip(statistics, ranks[0][3], strict=True):
        assert a == pytest.approx(b)
    for part, whole in ((0, y), (1, grad_x)):
        joined = torch.tensor(sum((got[part] for got in ranks), []))
        torch.testing.assert_close(joined, torch.tensor(whole))
    for index, whole in enumerate(grads):
        total = sum(torch.tensor(got[2][index]) for got in ranks)
        torch.testing.assert_close(total, torch.tensor(whole))


def in_training(rank, world_size, directory):
    leave = connect(rank, world_size, directory)
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 1))
    model = DistributedDataParallel(convert_sync_batchnorm(model), broadcast_buffers=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(5):
        x = torch.randn(3, 4, generator=generator)
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = (model(x) - 1).square().mean()
        loss.backward()
        optimizer.step()
    state = {name: it.tolist() for name, it in model.state_dict().items()}
    # On one rank alone: evaluation is no collective.
    model.eval()
    if rank == 0:
        model.module(x)
    leave()
    return state


def test_ranks_keep_equal_statistics_without_broadcasts():
    first, second = run(2, in_training)
    assert first == second
    assert first["module.1.running_mean"] != [0.0] * 6
    assert first["module.1.num_batches_tracked"] == 5


def test_without_a_process_group_it_is_batch_norm():
    plain, converted = network(), convert_sync_batchnorm(network())
    assert outcome(plain, images()) == outcome(converted, images())
    assert converted.state_dict().keys() == plain.state_dict().keys()
    one = torch.nn.BatchNorm1d(3, momentum=None)
    parameter = one.weight
    assert SyncBatchNorm.convert_sync_batchnorm(one).weight is parameter


class NormAct(torch.nn.BatchNorm2d):
    """A normalisation that does more: an activation, an argument, a buffer."""

    def __init__(self, channels):
        super().__init__(channels)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x, slope=0.1):
        self.calls += 1
        return torch.nn.functional.leaky_relu(super().forward(x), slope)


class Alone(torch.nn.BatchNorm1d):
    """Computes by itself."""

    def forward(self, x):
        return torch.nn.functional.batch_norm(x, None, None, self.weight, self.bias, True)


def without_bias(norm):
    norm.register_parameter("bias", None)
    return norm


def parametrised():
    norm = torch.nn.BatchNorm2d(3)
    torch.nn.utils.parametrize.register_parametrization(norm, "weight", torch.nn.Softplus())
    return norm


def frozen():
    norm = torch.nn.BatchNorm2d(3)
    norm.running_mean.fill_(0.5)
    return norm.eval()


def untracked_later():
    norm = torch.nn.BatchNorm2d(3)
    norm.track_running_stats = False
    return norm


KINDS = {
    "no bias": lambda: without_bias(torch.nn.BatchNorm2d(3)),
    "not affine": lambda: torch.nn.BatchNorm2d(3, affine=False),
    "cumulative": lambda: torch.nn.BatchNorm2d(3, momentum=None),
    "untracked": lambda: torch.nn.BatchNorm2d(3, track_running_stats=False),
    "untracked later": untracked_later,
    "subclass": lambda: NormAct(3),
    "lazy": lambda: torch.nn.LazyBatchNorm2d(),
    "parametrised": parametrised,
    "frozen": frozen,
    "of torch": lambda: torch.nn.SyncBatchNorm(3),
}


def batch(size, dims, dtype=torch.float64):
    shape = (size, 3, 4, 5, 2)[:dims]
    return torch.randn(shape, generator=torch.Generator().manual_seed(7), dtype=dtype) * 2 + 1


def trained(model, x, again=False):
    """What a step computes: output, gradients, statistics."""
    x = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    y = model(x)
    loss = (y.double().sin() * torch.arange(y.shape[-1])).sum()
    if again:
        # A penalty on the gradient, as for critics.
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        loss = loss + (slope.square() * torch.arange(1.0, 4).reshape(1, 3, 1, 1)).sum()
    loss.backward()
    return y.detach(), x.grad, [it.grad for it in model.parameters()], list(model.buffers())


def same(ours, whole, rank, sizes, **near):
    """Whether a rank has its part of what one process computes with the batches of all."""
    y, grad_x, grads, buffers = ours
    for part, all_of_it in ((y, whole[0]), (grad_x, whole[1])):
        torch.testing.assert_close(part, all_of_it.split(sizes)[rank], **near)
    for own, all_of_it in zip(grads, whole[2], strict=True):
        total = own.double()
        dist.all_reduce(total)
        torch.testing.assert_close(total, all_of_it.double(), **near)
    for own, all_of_it in zip(buffers, whole[3], strict=True):
        torch.testing.assert_close(own, all_of_it, **near)


def kinds(rank, world_size, directory):
    leave = connect(rank, world_size, directory)
    x = batch(sum(SIZES), 4)
    own = x.split(SIZES)[rank]
    for name, make in KINDS.items():
        for again in (False, True):
            norm, plain = make().double(), make().double()
            if name == "of torch":
                plain = torch.nn.BatchNorm2d(3).double()
            got = trained(convert_sync_batchnorm(norm), own, again)
            if name == "frozen":
                assert got[3][0].tolist() == plain.running_mean.tolist()
                plain.eval()
            assert isinstance(norm, SyncBatchNorm), name
            same(got, trained(plain, x, again), rank, SIZES)
    for dims in (2, 3, 5):
        shape = batch(sum(SIZES), dims)
        got = trained(SyncBatchNorm(3).double(), shape.split(SIZES)[rank])
        kind = {2: torch.nn.BatchNorm1d, 3: torch.nn.BatchNorm1d, 5: torch.nn.BatchNorm3d}[dims]
        same(got, trained(kind(3).double(), shape), rank, SIZES)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        # The weights stay in float32.
        short = batch(sum(SIZES), 4, dtype).contiguous(memory_format=torch.channels_last)
        got = trained(SyncBatchNorm(3), short.split(SIZES)[rank])
        assert got[0].dtype == got[1].dtype == dtype
        assert got[0].is_contiguous(memory_format=torch.channels_last)
        near = {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 0.05, "atol": 0.05}
        same(got, trained(torch.nn.BatchNorm2d(3), short), rank, SIZES, **near)
    # No rank has a value: as BatchNorm with an empty batch.
    norm, plain = SyncBatchNorm(3), torch.nn.BatchNorm2d(3)
    none = torch.empty(0, 3, 4, 5)
    same(trained(norm, none), trained(plain, none), rank, [0] * world_size)
    for wrong, error in ((torch.ones(2, 4), ValueError), (torch.ones(2, 3, dtype=torch.int64), TypeError)):
        with pytest.raises(error):
            norm(wrong)
    with pytest.warns(UserWarning, match="Alone normalises by itself"):
        convert_sync_batchnorm(Alone(3))(torch.ones(2, 3))
    leave()


def test_every_kind_of_batch_norm_computes_what_one_process_does():
    run(3, kinds)


def test_a_converted_module_keeps_what_it_has():
    norm, seen = NormAct(3).double(), []
    norm.register_forward_hook(lambda *_: seen.append("hook"))
    norm.note = "of the user"
    model = torch.nn.ModuleDict({"first": norm, "again": norm, "still": torch.nn.BatchNorm1d(2).eval()})
    before = dict(model.state_dict())
    converted = convert_sync_batchnorm(model)
    assert converted is model and model["first"] is model["again"] is norm
    assert isinstance(norm, SyncBatchNorm) and isinstance(norm, NormAct)
    assert norm.note == "of the user" and norm.weight.dtype is torch.float64
    assert not model["still"].training and type(model["still"]) is SyncBatchNorm
    assert all(it is before[name] or torch.equal(it, before[name]) for name, it in model.state_dict().items())
    x = batch(4, 4)
    expected = NormAct(3).double()(x, slope=0.5)
    copies = [copy.deepcopy(norm), pickle.loads(pickle.dumps(NormAct(3).double()))]
    copies.append(pickle.loads(pickle.dumps(convert_sync_batchnorm(NormAct(3).double()))))
    assert torch.equal(norm(x, slope=0.5), expected) and seen == ["hook"]
    for one in copies:
        assert torch.equal(one(x, slope=0.5), expected)
    assert type(copies[0]) is type(copies[2]) is type(norm)
    assert type(convert_sync_batchnorm(norm)) is type(norm)
    # Without parametrisations again.
    changed = convert_sync_batchnorm(parametrised())
    torch.nn.utils.parametrize.remove_parametrizations(changed, "weight")
    assert type(changed) is SyncBatchNorm and isinstance(changed.weight, torch.nn.Parameter)


def too_few(rank, world_size, directory):
    connect(rank, world_size, directory)
    SyncBatchNorm(3)(torch.ones(1 - rank, 3))


def test_one_value_per_channel_is_an_error_on_all_ranks():
    for how, text in run_and_see(2, too_few):
        assert how == "raised" and "more than 1 value per channel" in text, text


def compiled(rank, world_size, directory):
    leave = connect(rank, world_size, directory)
    out = []
    for compiles in (False, True):
        torch.manual_seed(0)
        module = torch.nn.Sequential(torch.nn.Linear(3, 3), SyncBatchNorm(3), torch.nn.BatchNorm1d(3))
        model = DistributedDataParallel(module)
        runs = torch.compile(model, backend="eager") if compiles else model
        x = torch.randn(4 - rank, 3, generator=torch.Generator().manual_seed(rank))
        for _ in range(3):
            model.zero_grad()
            (runs(x).sin() * torch.arange(3.0)).sum().backward()
        runs.eval()
        with torch.no_grad():
            out.append((gradients(model), runs(torch.ones(2, 3)).tolist()))
    leave()
    return out


@pytest.mark.slow  # A compiler takes its time.
def test_a_compiler_leaves_calls_of_other_ranks_as_they_are():
    first, second = run(2, compiled)
    assert first == second
    plain, by_compiler = first
    for one, other in zip((*plain[0], plain[1]), (*by_compiler[0], by_compiler[1]), strict=True):
        torch.testing.assert_close(torch.tensor(one), torch.tensor(other))
