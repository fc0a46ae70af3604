"""Steps of shards: the same bits on any number of ranks."""

from __future__ import annotations

import random

import numpy
import pytest
from ddp_models import KINDS, bits, connect
from ranks import run

torch = pytest.importorskip("torch")

from drumline import DistributedDataParallel, DrumlineError, NotBroughtError  # noqa: E402


def network():
    torch.manual_seed(5)
    norm = torch.nn.BatchNorm1d(40)
    layers = [torch.nn.Linear(12, 40), norm, torch.nn.Dropout(0.2), torch.nn.Linear(40, 3)]
    layers[3].double()

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList(layers)

        def forward(self, x):
            first, norm, dropout, last = self.layers
            return last(dropout(torch.relu(norm(first(x)))).double())

    return Net()


def loss_of(model, number):
    def loss(shard):
        generator = torch.Generator().manual_seed(100 * number + shard)
        x = torch.randn(6, 12, generator=generator) * (shard + 1)
        noise = torch.rand(1).item() + random.random() + numpy.random.rand()
        return (model(x) - noise).square().mean()

    return loss


def train(rank, world_size, directory, kind, shards, steps=4, seed=3):
    leave = connect(rank, world_size, directory, kind)
    model = DistributedDataParallel(network(), shards=shards, seed=seed, bucket_cap_mb=0.001)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for number in range(steps):
        losses.append(model.step(number, loss_of(model, number)))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    statistics = b"".join(it.numpy().tobytes() for it in model.buffers())
    model.reducer.stop()
    leave()
    return losses, bits(model), statistics


@pytest.mark.parametrize("shards", [4, 6])
def test_any_number_of_ranks_gives_the_same_bits(shards):
    [alone] = run(1, train, "plain", shards)
    for ranks in (2, 3, 4):
        kind = ("plain", *KINDS)[ranks % (1 + len(KINDS))]
        for of_rank in run(ranks, train, kind, shards):
            assert of_rank == alone, f"{ranks} ranks on {kind}"
    assert run(1, train, "plain", shards, 4, 4) != [alone], "other random numbers change nothing"


def one_shard_by_hand(rank, world_size, directory):
    leave = connect(rank, world_size, directory, "plain")
    model = DistributedDataParallel(network(), shards=1)
    plain = network()
    torch.manual_seed(9)
    random.seed(9)
    numpy.random.seed(9)
    before = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()
    seeds = []

    def loss(shard):
        seeds.append(torch.initial_seed())
        return loss_of(model, 0)(shard)

    value = model.step(0, loss)
    after = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()
    same = bool((before[0] == after[0]).all()), before[1] == after[1], before[2] == after[2]
    torch.manual_seed(seeds[0])
    random.seed(seeds[0])
    numpy.random.seed(seeds[0] % (1 << 32))
    theirs = loss_of(plain, 0)(0)
    theirs.backward()
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    grads = all(torch.equal(ours.grad, other.grad) for ours, other in pairs)
    leave()
    return same, value == theirs.item(), grads


def test_generators_are_as_before_and_one_shard_is_plain_training():
    assert run(1, one_shard_by_hand) == [((True, True, True), True, True)]


def misuse(rank, world_size, directory):
    leave = connect(rank, world_size, directory, "plain")
    told = []

    def raised(function, *args, **kwargs):
        try:
            function(*args, **kwargs)
        except Exception as error:
            told.append(f"{type(error).__name__}: {error}")
        else:
            told.append("nothing")

    raised(DistributedDataParallel, network(), shards=2)
    raised(DistributedDataParallel, network(), shards=5 + rank)
    raised(DistributedDataParallel, network().bfloat16(), shards=3)
    model = DistributedDataParallel(network(), shards=7)
    before = bits(model), [it.tolist() for it in model.buffers()]
    raised(model, torch.ones(2, 12))
    raised(model.no_sync().__enter__)

    def fails(shard):
        if shard == 3:
            raise KeyError("no batch")
        return loss_of(model, 0)(shard)

    raised(model.step, 0, fails)
    skipping = [it for name, it in model.named_parameters() if "layers.3" in name]

    def skips(shard):
        if shard == 6:
            return model(torch.ones(2, 12)).detach().sum() + sum(it.sum() for it in skipping)
        return loss_of(model, 0)(shard)

    raised(model.step, 0, skips)
    raised(model.step, 4 + rank // 2, loss_of(model, 0))
    same = before == (bits(model), [it.tolist() for it in model.buffers()])
    nothing = all(it.grad is None for it in model.parameters())
    value = model.step(0, loss_of(model, 0))
    model.reducer.stop()
    raised(DistributedDataParallel(network()).step, 0, fails)
    leave()
    return told, same, nothing, value


def test_misuse_and_failures_are_named_on_all_ranks_and_change_nothing():
    outcomes = run(3, misuse)
    assert len({value for _, _, _, value in outcomes}) == 1
    for rank, (told, same, nothing, _) in enumerate(outcomes):
        assert same and nothing
        few, differ, narrow, forward, no_sync, failed, skipped, numbers, without = told
        assert "2 shards are too few for 3 ranks" in few
        assert "option `shards` is 6 with seed 0, rank 0 has 5" in differ
        assert "would be rounded on the way from shard to shard" in narrow
        assert "has no place beside `step`" in forward and "no_sync" in no_sync
        mine = "KeyError: 'no batch'"
        others = f"{DrumlineError.__name__}: step 0: the step failed in the program on rank 1; "
        assert failed.startswith(mine if rank == 1 else others), failed
        text = f"{NotBroughtError.__name__}: step 0: parameter layers.0.weight got no gradient on rank 2"
        assert skipped.startswith(text), skipped
        assert "layers.3" not in skipped
        assert "rank 0 runs step 4, and rank 2 step 5" in numbers, numbers
        assert "shards=8" in without
