"""Time limits: any duration is one, and nonsense is an error that names the argument."""

from __future__ import annotations

import math
from datetime import timedelta

import numpy as np
import pytest
from ranks import run, wait_for
from torch_versions import needs_backends

import drumline

ENDLESS = [2.0**63, 1e19, 1e300, math.inf, timedelta.max]
NONSENSE = [math.nan, -1.0, -math.inf, timedelta(seconds=-1)]


def waiting(rank, world_size, directory):
    drumline.init_process_group(
        f"file://{directory}/store", rank=rank, world_size=world_size, timeout=math.inf, warn_after=1e300
    )
    group = drumline._world.group_or_world(None)
    for limit in ENDLESS:
        group.set_timeout(limit)
        data = np.ones(2)
        assert group.all_reduce(data, async_op=True).wait(limit)
        assert data.tolist() == [world_size] * 2
        group.monitored_barrier(limit)
    part = group.new_group([0, 1], name="part", timeout=timedelta.max)
    part.barrier()
    work = group.all_reduce(np.ones(2), async_op=True)
    for limit in NONSENSE:
        with pytest.raises(ValueError, match="timeout is"):
            work.wait(limit)
        with pytest.raises(ValueError, match="timeout is"):
            group.set_timeout(limit)
        with pytest.raises(ValueError, match="timeout is"):
            group.monitored_barrier(limit)
        with pytest.raises(ValueError, match="timeout is"):
            group.new_group([0, 1], name="none", timeout=limit)
    work.wait(math.inf)
    part.destroy()
    drumline.destroy_process_group()


def test_groups_take_any_time_limit():
    run(2, waiting)


@pytest.mark.parametrize("limit", NONSENSE)
def test_no_group_begins_with_a_time_limit_that_is_nonsense(limit):
    with pytest.raises(ValueError, match="timeout is"):
        drumline.init_process_group(
            "tcp://127.0.0.1:0", rank=0, world_size=1, timeout=limit
        )


def test_stores_take_any_time_limit(tmp_path):
    master = drumline.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta.max)
    for store in (master, drumline.HashStore(), drumline.FileStore(tmp_path / "store", 1)):
        store.set("key", "value")
        store.set_timeout(timedelta.max)
        assert store.timeout > timedelta(days=365_000)
        store.wait(["key"], timedelta.max)
        store.barrier("all", 1, timedelta.max)
        store.wait(["key"], timedelta(0))
        for call in (store.set_timeout, lambda limit: store.wait(["key"], limit)):
            with pytest.raises(ValueError, match="timeout is"):
                call(timedelta(seconds=-1))
        with pytest.raises(ValueError, match="timeout is"):
            store.barrier("all", 1, timedelta(seconds=-1))


def nothing(rank):
    pass


@pytest.mark.parametrize("limit", [1e19, math.inf])
def test_spawned_processes_are_awaited_for_any_time(limit):
    context = drumline.spawn(nothing, nprocs=2, join=False, start_method="fork")
    assert context is not None and context.join(limit)


@pytest.mark.parametrize("limit", [math.nan, -1.0])
def test_spawned_processes_are_not_awaited_for_nonsense(limit):
    context = drumline.spawn(nothing, nprocs=1, join=False, start_method="fork")
    assert context is not None
    with pytest.raises(ValueError, match="timeout is"):
        context.join(limit)
    assert context.join()


def one_is_missing(rank, world_size, directory, first):
    """The time limit of rank ``first`` is over before that of the other one."""
    group = drumline.init_process_group(
        f"file://{directory}/store", rank=rank, world_size=world_size, timeout=60
    )
    group.barrier()
    if rank == 2:
        wait_for(f"{directory}/over")
        return None
    group.set_timeout(0.5 if rank == first else 30)
    with pytest.raises(drumline.CollectiveError) as error:
        group.all_reduce(np.ones(3))
    for _ in range(2):
        open(f"{directory}/over-{rank}", "w").close()
        wait_for(f"{directory}/over-{1 - rank}")
    open(f"{directory}/over", "w").close()
    return type(error.value).__name__, error.value.cause, error.value.culprit


@pytest.mark.parametrize("first", [0, 1])
def test_every_rank_gets_the_same_error_at_a_time_limit(first):
    one, other, _ = run(3, one_is_missing, first)
    assert one == other == ("CollectiveTimeoutError", "timeout", 2)


def told_of_a_limit(rank, world_size, directory):
    dist = pytest.importorskip("torch.distributed")
    from drumline.ddp.groups import core_group

    dist.init_process_group("drumline", f"file://{directory}/store", rank=rank, world_size=world_size)
    text = ""
    if rank == 0:
        core_group(dist.group.WORLD).set_timeout(0.2)
        with pytest.raises(dist.DistBackendError) as error:
            dist.barrier()
        text = str(error.value)
        open(f"{directory}/told", "w").close()
    wait_for(f"{directory}/told")
    return text


@needs_backends
def test_an_error_of_torchs_groups_names_the_argument_that_sets_the_limit():
    text, _ = run(2, told_of_a_limit)
    assert "timeout= of init_process_group or new_group is the limit" in text, text
    assert "DRUMLINE_TIMEOUT_S" not in text, text
