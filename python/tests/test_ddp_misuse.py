"""Errors of drumline.DistributedDataParallel reach every rank."""

from __future__ import annotations

import os
import signal
import threading
from datetime import timedelta

import pytest
from ranks import run_and_see, wait_for
from test_ddp import connect, network

torch = pytest.importorskip("torch")

from drumline import DistributedDataParallel  # noqa: E402


def differing(rank, world_size, directory, what):
    connect(rank, world_size, directory)
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6))
    options = {}
    if rank == 1:
        if what == "shape":
            model[0] = torch.nn.Linear(6, 4)
        elif what == "type":
            model[0].double()
        elif what == "buffer":
            model[1].register_buffer("more", torch.ones(2))
        elif what == "frozen":
            model[0].bias.requires_grad_(False)
        elif what == "option":
            options["find_unused_parameters"] = True
    DistributedDataParallel(model, **options)


NAMED = {
    "shape": "`0.weight", "type": "f64", "buffer": "`1.more`", "frozen": "`0.bias`",
    "option": "unused parameters",
}  # fmt: skip


@pytest.mark.parametrize("what", NAMED)
def test_models_that_differ_are_named_on_all_ranks(what):
    for how, text in run_and_see(2, differing, what):
        assert how == "raised" and "drumline.DrumlineError" in text, text
        assert "rank 1" in text and NAMED[what] in text, text


def raises_in_a_hook(rank, world_size, directory, caught):
    connect(rank, world_size, directory)
    model = DistributedDataParallel(network())
    if rank == 1:
        # Runs in the middle: the last layer's gradients have left.
        model.module[0].weight.register_hook(lambda gradient: 1 // 0)
    x = torch.ones(4, 12)
    if rank == 1 and caught:
        with pytest.raises(ZeroDivisionError):
            model(x).sum().backward()
    model(x).sum().backward()


@pytest.mark.parametrize("caught", [False, True])
def test_an_exception_in_a_hook_is_heard_of_by_all_ranks(caught):
    (how, text), (other, why) = run_and_see(2, raises_in_a_hook, caught)
    assert how == other == "raised", (text, why)
    assert "rank 1" in text and "drumline.CollectiveError" in text, text
    assert ("backward has raised" if caught else "ZeroDivisionError") in why, why


def dies(rank, world_size, directory):
    connect(rank, world_size, directory)
    model = DistributedDataParallel(network())
    x = torch.ones(4, 12)
    model(x).sum().backward()
    if rank == 2:
        model.module[0].weight.register_hook(lambda gradient: os._exit(7))
    model(x).sum().backward()


def test_a_rank_that_dies_in_backward_is_named_on_the_others():
    first, second, dead = run_and_see(3, dies)
    assert dead == ("exited", 7)
    for how, text in (first, second):
        assert how == "raised" and "drumline.CollectiveError" in text, text
        assert "rank 2" in text and "0.weight" in text and "all_gather" in text, text


def is_late(rank, world_size, directory):
    connect(rank, world_size, directory, "gloo", timeout=timedelta(seconds=2))
    outputs = DistributedDataParallel(network())(torch.ones(4, 12))
    if rank == 1:
        wait_for(f"{directory}/over")
    try:
        outputs.sum().backward()
    finally:
        open(f"{directory}/over", "w").close()


def test_a_rank_that_comes_too_late_is_named():
    (how, text), (other, why) = run_and_see(2, is_late)
    assert how == "raised" and "drumline.CollectiveTimeoutError" in text, text
    assert "rank 1" in text, text
    assert other == "raised" and "rank" in why, why


def twice(rank, world_size, directory):
    from torch.utils.checkpoint import checkpoint

    connect(rank, world_size, directory)
    layer = torch.nn.Linear(4, 4)

    class Twice(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            for _ in range(2):
                x = checkpoint(self.layer, x, use_reentrant=True)
            return x

    DistributedDataParallel(Twice())(torch.ones(2, 4, requires_grad=True)).sum().backward()


def test_two_gradients_for_a_parameter_are_told_with_its_name():
    outcomes = run_and_see(2, twice)
    assert all(how == "raised" for how, _ in outcomes), outcomes
    assert any("layer." in text and "static_graph" in text for _, text in outcomes), outcomes


def sparse(rank, world_size, directory):
    connect(rank, world_size, directory)
    model = DistributedDataParallel(torch.nn.Embedding(4, 2, sparse=True))
    model(torch.tensor([1])).sum().backward()


def test_sparse_gradients_are_refused_by_name():
    for how, text in run_and_see(2, sparse):
        assert how == "raised", text
    assert any("weight" in text and "sparse" in text for _, text in run_and_see(1, sparse))


def interrupted(rank, world_size, directory):
    connect(rank, world_size, directory)
    outputs = DistributedDataParallel(network())(torch.ones(4, 12))
    if rank == 0:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    else:
        # Comes when the other has been interrupted, and tells of it.
        wait_for(f"{directory}/over")
    try:
        outputs.sum().backward()
    finally:
        open(f"{directory}/over", "w").close()


def test_control_c_ends_a_backward_and_the_others_hear_of_it():
    (how, text), (other, why) = run_and_see(2, interrupted)
    assert how == "raised" and text.startswith("builtins.KeyboardInterrupt"), text
    assert other == "raised" and "rank 0" in why and "aborted" in why, why


def after_stop(rank, world_size, directory):
    leave = connect(rank, world_size, directory)
    model = DistributedDataParallel(network())
    x = torch.ones(4, 12)
    model(x).sum().backward()
    kept = model.module[0].weight.grad
    before = kept.clone()
    model.reducer.stop()
    model.reducer.stop()
    leave()
    assert torch.equal(kept, before)
    model.broadcast_buffers = False
    model(x).sum().backward()  # on this rank alone
    raise AssertionError("not reduced" if not model.reducer.sync_grad else "reduced")


def test_after_stop_gradients_are_not_averaged():
    for how, text in run_and_see(2, after_stop):
        assert how == "raised" and "not reduced" in text, text
