"""drumline.SyncBatchNorm."""

from __future__ import annotations

import pytest
from ranks import run, run_and_see
from test_ddp import connect

torch = pytest.importorskip("torch")

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


def too_few(rank, world_size, directory):
    connect(rank, world_size, directory)
    SyncBatchNorm(3)(torch.ones(1 - rank, 3))


def test_one_value_per_channel_is_an_error_on_all_ranks():
    for how, text in run_and_see(2, too_few):
        assert how == "raised" and "more than 1 value per channel" in text, text
