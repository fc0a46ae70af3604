"""Errors of drumline.DistributedDataParallel reach every rank."""

from __future__ import annotations

import os
import signal
import threading
from datetime import timedelta

import pytest
from ddp_models import connect, network
from ranks import run, run_and_see, wait_for

torch = pytest.importorskip("torch")

import drumline  # noqa: E402
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


def diverging(rank, world_size, directory):
    leave = connect(rank, world_size, directory)
    x = torch.randn(4, 12, generator=torch.Generator().manual_seed(rank))

    def told(odd, what, steps=3, model=None, **options):
        """What each step has raised. ``what(model, optimizer, step)`` is done before it on rank ``odd``."""
        model = DistributedDataParallel(network(), **options) if model is None else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        said = []
        for step in range(steps):
            if rank == odd:
                what(model, optimizer, step)
            try:
                optimizer.zero_grad()
                model(x * (1 + step)).square().sum().backward()
                said.append("")
            except drumline.DrumlineError as error:
                said.append(str(error))
            optimizer.step()
        model.reducer.stop()
        return said

    def rate(model, optimizer, step):
        optimizer.param_groups[0]["lr"] = 0.2

    def later(model, optimizer, step):
        if step == 2:
            with torch.no_grad():
                model.module[3].weight[0, 0] += 1

    def load(model, optimizer, step):
        if step == 0:
            torch.manual_seed(9)
            model.module[3].reset_parameters()

    def unwrapped(model, optimizer, step):
        if step == 1:
            with model.no_sync():
                model.module(x).sum().backward()
            optimizer.step()

    def freeze(model, optimizer, step):
        for group in optimizer.param_groups:
            group["params"] = group["params"][:-1]

    def nothing(model, optimizer, step):
        pass

    ignoring = network()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(ignoring, ["3.weight", "3.bias"])
    with_nan = network()
    with torch.no_grad():
        with_nan[3].weight[0] = float("nan")
    out = {
        "rate": told(1, rate),
        "of rank 0": told(0, rate),
        "load": told(2, load),
        "frozen": told(1, freeze),
        "unwrapped": told(1, unwrapped),
        "every": told(1, later, 6, check_every=2),
        "first only": told(1, later, 6, check_every=None),
        "equal": told(None, nothing, 4, check_every=1),
        "views": told(None, nothing, 4, check_every=1, gradient_as_bucket_view=True),
        "NaN": told(None, nothing, model=DistributedDataParallel(with_nan)),
        "ignored": told(1, load, model=DistributedDataParallel(ignoring)),
        "no buffers": told(None, nothing, broadcast_buffers=False),
        "not compared": told(1, rate, init_sync=False),
    }
    model = DistributedDataParallel(network())
    hook = lambda state, bucket: torch.futures.collect_all([])  # noqa: E731
    model.register_comm_hook(None, lambda state, bucket: hook(state, bucket).then(lambda _: bucket.buffer()))
    out["hook"] = told(1, rate, model=model)
    # A rank whose data has ended keeps its parameters until all have ended.
    model = DistributedDataParallel(network(), check_every=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.join():
        for step in range(1 + 2 * rank):
            optimizer.zero_grad()
            model(x * (1 + step)).square().sum().backward()
            optimizer.step()
    model.reducer.stop()
    with pytest.raises(drumline.DrumlineError, match=r"check_every.*\[\[0, 1\], \[5, 1\], \[0, 1\]\]"):
        DistributedDataParallel(network(), check_every=5 if rank == 1 else 0)
    with pytest.raises(ValueError, match="check_every.* -1"):
        DistributedDataParallel(network(), check_every=-1)
    leave()
    return out


def test_parameters_that_differ_after_a_step_are_named_with_the_rank():
    outs = run(3, diverging)
    assert outs[0] == outs[1] == outs[2], outs
    out = outs[0]
    quiet = ("first only", "equal", "views", "NaN", "ignored", "no buffers", "not compared", "hook")
    for name in quiet:
        assert not any(out[name]), (name, out[name])
    for name, rank, parameter, step in (
        ("rate", 1, "0.weight", 1), ("of rank 0", 0, "0.weight", 1), ("load", 2, "3.weight", 1),
        ("frozen", 1, "3.bias", 1), ("unwrapped", 1, "0.weight", 1), ("every", 1, "3.weight", 2),
    ):  # fmt: skip
        told = [(at, text) for at, text in enumerate(out[name]) if text]
        assert told[0][0] == step, (name, out[name])
        wanted = f"after step {step}, parameter `{parameter}` has other values on rank {rank} than on most ranks"
        assert wanted in told[0][1], (name, told)
    assert [bool(text) for text in out["every"]] == [False, False, True, False, True, False]


def changed_modules(rank, world_size, directory):
    leave = connect(rank, world_size, directory)
    x = torch.ones(4, 12)

    def adapted(model):
        model.module[0].register_parameter("more", torch.nn.Parameter(torch.ones(1)))

    def replaced(model):
        model.module[3] = torch.nn.Linear(40, 3)

    def assigned(model):
        state = {name: it.clone() for name, it in model.state_dict().items()}
        model.load_state_dict(state, assign=True)

    def unfrozen(model):
        model.module[0].bias.requires_grad_(True)

    def swapped(model):
        torch.utils.swap_tensors(model.module[0].bias, torch.nn.Parameter(torch.ones(40)))

    said = []
    for change in (adapted, replaced, assigned, unfrozen, swapped):
        module = network()
        module[0].bias.requires_grad_(change is not unfrozen)
        model = DistributedDataParallel(module)
        model(x).sum().backward()
        with pytest.raises(RuntimeError) as raised:
            change(model)
            model(x).sum().backward()
        said.append(str(raised.value))
        model.reducer.stop()
    # What does not concern training may change.
    model = DistributedDataParallel(network())
    model.module[2] = torch.nn.Sequential(torch.nn.Tanh())
    model.module[0].bias.requires_grad_(False)
    model.module[0].bias.requires_grad_(True)
    model(x).sum().backward()
    model.reducer.stop()
    leave()
    return said


def test_parameters_that_came_after_the_wrapper_are_named():
    for said in run(2, changed_modules):
        names = ("0.more", "3.weight", "0.weight", "0.bias")
        for name, text in zip(names, said, strict=False):
            assert f"parameter {name} was not there or not trained" in text, text
        assert "swap" in said[-1], said


class Skipping(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)

    def forward(self, x, layers):
        for layer in layers:
            x = getattr(self, layer)(x)
        return x


def not_static(rank, world_size, directory, first, then):
    connect(rank, world_size, directory)
    model = DistributedDataParallel(Skipping(), static_graph=True)
    for layers in (first, first, then):
        model(torch.ones(1, 2), layers).sum().backward()


@pytest.mark.parametrize("first, then", [("a", "ab"), ("ab", "a")])
def test_a_graph_that_is_not_static_is_told(first, then):
    outcomes = run_and_see(2, not_static, first, then)
    for how, text in outcomes:
        assert how == "raised" and "the graph is not static" in text and "b.bias" in text, text
        assert "find_unused_parameters=True" in text and "or static_graph=True" not in text, text
