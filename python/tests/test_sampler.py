"""The sampler has torch's order, and can go on."""

from __future__ import annotations

import pytest

from drumline import DistributedSampler, evaluation_shard


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("samples", [0, 1, 2, 5, 10, 1000])
def test_the_order_is_torchs(samples, shuffle, drop_last):
    data = pytest.importorskip("torch.utils.data")
    for world_size in (1, 3, 4):
        for rank in range(world_size):
            args = (range(samples), world_size, rank, shuffle, 7, drop_last)
            ours, theirs = DistributedSampler(*args), data.DistributedSampler(*args)
            for epoch in (0, 1, 5):
                ours.set_epoch(epoch)
                theirs.set_epoch(epoch)
                assert list(ours) == list(theirs)
                assert len(ours) == len(theirs)


def test_an_epoch_goes_on_with_another_number_of_ranks():
    before = [DistributedSampler(range(12), 2, rank) for rank in range(2)]
    seen = []
    for sampler in before:
        sampler.set_epoch(3)
        seen += list(sampler)[:2]
        sampler.advance(2)
    state = before[0].state_dict()
    assert state == before[1].state_dict()
    for rank in range(4):
        sampler = DistributedSampler(range(12), 4, rank)
        sampler.load_state_dict(state)
        assert sampler.epoch == 3
        seen += list(sampler)
    assert sorted(seen) == list(range(12))
    with pytest.raises(ValueError, match="samples"):
        DistributedSampler(range(13), 2, 0).load_state_dict(state)


def test_evaluation_sees_every_sample_once():
    shards = [list(evaluation_shard(10, 4, rank)) for rank in range(4)]
    assert sum(shards, []) == list(range(10))


def test_without_a_group_of_drumlines_the_place_is_torchs():
    dist = pytest.importorskip("torch.distributed")
    fake = pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    with pytest.raises(ValueError, match="no group"):
        DistributedSampler(range(8))
    dist.init_process_group("fake", store=fake.FakeStore(), rank=1, world_size=4)
    try:
        assert list(DistributedSampler(range(8), shuffle=False)) == [1, 5]
    finally:
        dist.destroy_process_group()


def test_an_empty_share_is_empty():
    for sampler in (DistributedSampler([], 2, 1), DistributedSampler(range(2), 3, 0, drop_last=True)):
        assert (len(sampler), list(sampler)) == (0, [])
        sampler.set_epoch(3)
        sampler.advance(1)
        again = DistributedSampler(sampler.dataset, 4, 0, drop_last=sampler.drop_last)
        again.load_state_dict(sampler.state_dict())
        assert again.epoch == 3 and list(again) == []
