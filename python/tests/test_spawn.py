"""Ranks as processes of a program."""

from __future__ import annotations

import os
import signal

import numpy as np
import pytest

import drumline


def summing(rank, add):
    drumline.init_process_group()
    data = np.array([rank + add])
    drumline.all_reduce(data)
    assert data.item() == 2 * add + 1
    drumline.destroy_process_group()


def test_spawned_processes_connect():
    drumline.spawn(summing, (5,), nprocs=2)


def failing(rank, how):
    drumline.init_process_group()
    if rank == 1:
        if how == "raises":
            raise RuntimeError("out of patience")
        if how == "exits":
            os._exit(3)
        os.kill(os.getpid(), signal.SIGKILL)
    drumline.barrier()


@pytest.mark.parametrize(
    ("how", "text", "code"),
    [("raises", "out of patience", 1), ("exits", "code 3|rank 1", None), ("dies", "signal 9|rank 1", None)],
)
def test_the_failure_is_that_of_the_rank(how, text, code):
    with pytest.raises(drumline.ProcessRaisedError, match=text) as raised:
        drumline.spawn(failing, (how,), nprocs=2)
    if code is not None:
        assert (raised.value.error_index, raised.value.exit_code) == (1, code)
