"""Ranks that are killed, and the others, which go on without them."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy
import pytest
from ranks import run_and_see

import drumline

KILLED = ("exited", -signal.SIGKILL)
SOAK = os.environ.get("DRUMLINE_SOAK", "0") != "0"


def kill_this():
    os.kill(os.getpid(), signal.SIGKILL)


def connect(rank, world_size, directory, **settings):
    store = drumline.FileStore(f"{directory}/store", world_size)
    drumline.init_process_group(store=store, rank=rank, world_size=world_size, min_ranks=1, **settings)


def pieces(rank, world_size, directory, deaths):
    connect(rank, world_size, directory)
    elastic, seen = drumline.ElasticGroup(), []
    began = elastic.group

    def piece(group):
        if deaths.get(rank) == number:
            kill_this()
        numbers = numpy.full(3, number + 1.0)
        group.all_reduce(numbers)
        return numbers.tolist(), group.rank, group.world_size

    for number in range(5):
        seen.append(elastic.run(piece))
    assert (elastic.group is began) == (world_size == 1)
    # The functions of the package use the group that is there.
    numbers = numpy.ones(1)
    drumline.all_reduce(numbers)
    seen.append((numbers.tolist(), drumline.get_rank(), drumline.get_world_size()))
    elastic.close()
    assert not drumline.is_initialized()
    with pytest.raises(ValueError, match="has been closed"):
        elastic.run(piece)
    return seen


def test_pieces_run_again_without_the_dead():
    outcomes = run_and_see(4, pieces, {0: 1, 2: 3, 3: 3})
    assert [outcomes[rank] for rank in (0, 2, 3)] == [KILLED] * 3
    how, seen = outcomes[1]
    assert how == "returned", seen
    sizes = [4, 3, 3, 1, 1]
    expected = [([(number + 1.0) * size] * 3, int(size == 4), size) for number, size in enumerate(sizes)]
    assert seen == [*expected, ([1.0], 0, 1)]


def failing(rank, world_size, directory):
    connect(rank, world_size, directory)
    elastic, calls = drumline.ElasticGroup(), []

    def fails(group):
        calls.append(group.world_size)
        raise KeyError("no batch")

    def nested(group):
        elastic.run(fails)

    for piece, error, text in ((fails, KeyError, "no batch"), (nested, ValueError, "one after the other")):
        with pytest.raises(error, match=text):
            elastic.run(piece)
    with pytest.raises(TypeError):
        drumline.ElasticGroup(7)
    elastic.close()
    return calls


def test_an_error_of_the_program_is_raised_and_nothing_is_run_again():
    assert run_and_see(2, failing) == [("returned", [2])] * 2


def too_few(rank, world_size, directory):
    store = drumline.FileStore(f"{directory}/store", world_size)
    drumline.init_process_group(store=store, rank=rank, world_size=world_size, min_ranks=2)
    elastic = drumline.ElasticGroup()
    elastic.run(lambda group: kill_this() if rank == 1 else group.barrier())
    with pytest.raises(drumline.DrumlineError, match=r"1 rank is left \(2\), and the job needs 2") as raised:
        elastic.run(lambda group: kill_this() if rank == 0 else group.barrier())
    return raised.value.culprit


def test_too_few_ranks_are_an_error():
    assert run_and_see(3, too_few) == [KILLED, KILLED, ("returned", 0)]


def count(group):
    """A piece, in whose call all ranks of its group are. If one dies later, the group may be smaller when the piece returns."""
    import torch

    tensor = torch.ones(1)
    group.all_reduce(tensor)
    assert tensor.item() == group.world_size


def train(rank, world_size, directory, deaths, kind):
    """``deaths``: at which of the places that a rank reaches it is killed, and after how long there."""
    import ddp_models
    import torch
    from ddp_models import bits
    from test_shards import loss_of, network

    torch.set_num_threads(1)
    if kind == "plain":
        connect(rank, world_size, directory)
    else:
        os.environ["DRUMLINE_MIN_RANKS"] = "1"
        leave = ddp_models.connect(rank, world_size, directory, kind)
    model = drumline.DistributedDataParallel(network(), shards=6, seed=3, bucket_cap_mb=0.001, check_every=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses, places = [], iter(range(1000))

    def reached():
        place, within = deaths.get(rank, (None, None))
        if next(places) == place:
            if within is None:
                kill_this()
            threading.Thread(target=lambda: (time.sleep(within), kill_this())).start()

    torch.manual_seed(1)
    for number in range(5):
        loss = loss_of(model, number)
        losses.append(model.step(number, lambda shard, loss=loss: (reached(), loss(shard))[1]))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(torch.rand(1).item())
        reached()
    assert model.reducer.steps == 5 and model.reducer.sync_grad
    statistics = b"".join(it.numpy().tobytes() for it in model.buffers())
    with pytest.raises(KeyError):
        model.step(5, lambda shard: {}[shard])
    model.elastic.run(count)
    if kind == "drumline" and model.elastic.group.world_size < world_size:
        with pytest.raises(torch.distributed.DistBackendError, match=r"rank \d .*has ended"):
            torch.distributed.all_reduce(torch.ones(1))
    model.elastic.close()
    if kind != "plain":
        leave()
    return losses, bits(model), statistics


def goes_on(world_size, deaths, kind="plain"):
    [alone] = run_and_see(1, train, {}, "plain")
    assert alone[0] == "returned", alone[1]
    for rank, outcome in enumerate(run_and_see(world_size, train, deaths, kind)):
        if rank in deaths and outcome == KILLED:
            continue
        assert outcome == alone, f"rank {rank} after {deaths}, {kind}: {outcome}"
        assert rank not in deaths or deaths[rank][1] is not None


@pytest.mark.parametrize(
    ("world_size", "deaths"),
    [
        # In the first step, between two steps, in the middle of one.
        (2, {0: (0, None)}),
        (2, {1: (7, None)}),
        (3, {0: (4, None), 2: (8, None)}),
        (4, {1: (1, None), 0: (7, None), 3: (12, None)}),
    ],
)
def test_a_step_of_shards_goes_on_without_ranks_that_are_killed(world_size, deaths):
    pytest.importorskip("torch")
    goes_on(world_size, deaths)


def test_a_rank_may_be_killed_at_any_moment():
    pytest.importorskip("torch")
    draw = random.Random(5)
    for kind in ["plain", "drumline", "gloo"] * (34 if SOAK else 1):
        world_size = draw.randint(2, 4)
        rank, place = draw.randrange(world_size), draw.randrange(10)
        goes_on(world_size, {rank: (place, draw.uniform(0, 0.01))}, kind)


def test_under_the_launcher_rank_0_may_be_killed():
    pytest.importorskip("torch")
    program, digests = str(Path(__file__).with_name("launched.py")), []
    for name, ranks, left in (("loses_rank_0", 1, 1), ("loses_rank_0", 3, 2), ("loses_rank_0_of_torch", 3, 2)):
        run = ["run", "--nproc-per-node", str(ranks), "--", sys.executable, program, name]
        command = [sys.executable, "-m", "drumline", *run]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        lost = re.search(r"rank 0 \(pid \d+\) was killed by .*the job goes on without it", done.stderr)
        assert bool(lost) == (ranks > left), done.stderr
        assert not re.search("Exception|UserWarning", done.stderr), done.stderr
        told = re.findall(r"digest (\w+)", done.stdout)
        assert len(told) == left, done.stdout
        digests += told
    assert len(set(digests)) == 1


@pytest.mark.parametrize("kind", ["drumline", "gloo"])
def test_a_step_on_torchs_group_of_all_ranks_goes_on(torch_base, kind):
    pytest.importorskip("torch")
    goes_on(3, {0: (4, None), 2: (8, None)}, kind)


def on_some_ranks(rank, world_size, directory):
    import torch.distributed as dist
    from ddp_models import connect
    from test_shards import loss_of, network

    leave = connect(rank, world_size, directory)
    some = dist.new_group([0, 1])
    if rank == 2:
        return leave()
    model = drumline.DistributedDataParallel(network(), process_group=some, shards=2)
    assert model.elastic is None
    with pytest.raises(TypeError, match="a group is what drumline"):
        drumline.ElasticGroup(some)
    model.step(0, loss_of(model, 0))
    with pytest.raises(drumline.CollectiveError) as raised:
        model.step(1, lambda shard: kill_this() if rank == 0 else loss_of(model, 1)(shard))
    return raised.value.culprit


def test_on_a_group_of_some_ranks_a_death_ends_the_step(torch_base):
    pytest.importorskip("torch")
    killed, (how, what), _ = run_and_see(3, on_some_ranks)
    assert killed == KILLED
    assert (how, what) == ("returned", 0), what
