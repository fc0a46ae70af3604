"""The rank at fault, as an attribute of errors: its number in the job, whichever group has failed."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
from ranks import run, wait_for

import drumline


def fails_in_a_group_of_some(rank, world_size, directory):
    """Rank 2 of the job, which is rank 1 of the group, breaks the group off. Returns the culprits of all errors."""
    world = drumline.init_process_group(f"file://{directory}/store", rank=rank, world_size=world_size)
    culprits = []
    if rank != 0:
        group = world.new_group([1, 2])
        if rank == 2:
            group.abort()
        for call in (lambda: group.all_reduce(np.ones(2)), group.barrier):
            with pytest.raises(drumline.DrumlineError) as error:
                call()
            culprits.append(error.value.culprit)
    world.barrier()
    world.destroy()
    return culprits


def test_the_culprit_is_a_number_in_the_job():
    assert run(3, fails_in_a_group_of_some) == [[], [2, 2], [2, 2]]


def leaves_after_a_failure(rank, world_size, directory, goes_on):
    """Rank 1 fails in a group with rank 0, which leaves all groups, perhaps later. Returns whom rank 2 blames for that."""
    world = drumline.init_process_group(f"file://{directory}/store", rank=rank, world_size=world_size)
    told = None
    if rank < 2:
        half = world.new_group([0, 1])
        if rank == 1:
            half.abort()
        with pytest.raises(drumline.CollectiveError):
            half.barrier()
    if goes_on:
        world.barrier()
    if rank < 2:
        if rank == 1:
            wait_for(f"{directory}/over")
        else:
            with pytest.raises(drumline.CollectiveError):
                world.destroy()
    else:
        with pytest.raises(drumline.CollectiveError) as error:
            world.broadcast(np.ones(2), 0)
        told = error.value.cause, error.value.culprit
        open(f"{directory}/over", "w").close()
    return told


def test_a_rank_that_leaves_after_a_failure_is_not_blamed():
    assert run(3, leaves_after_a_failure, False) == [None, None, ("reported", 1)]


def test_a_rank_that_has_gone_on_after_a_failure_and_leaves_is_blamed():
    assert run(3, leaves_after_a_failure, True) == [None, None, ("peer_left", 0)]


def test_every_error_has_a_culprit():
    errors = [it for _, it in inspect.getmembers(drumline) if inspect.isclass(it) and issubclass(it, drumline.DrumlineError)]
    assert len(errors) >= 9
    assert all(it("x").culprit is None for it in errors), errors
