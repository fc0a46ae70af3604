"""The examples do what they say."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
from torch_versions import VERSION, needs_backends, needs_entry_points

pytest.importorskip("torch")
pytestmark = needs_backends

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "python"
DIGITS = ROOT / "examples" / "fashion-mnist" / "data" / "digits.csv.gz"
TWO_RANKS = [sys.executable, "-m", "drumline", "run", "--nproc-per-node", "2", "--", sys.executable]


def out_of(*command, ranks=None):
    """What an example prints; the launcher's marks of ranks are left out."""
    start = TWO_RANKS if ranks else [sys.executable]
    done = subprocess.run(
        [*start, *map(str, command)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return re.sub(r"^\[\d+\] ", "", done.stdout, flags=re.MULTILINE)


@needs_entry_points
def test_the_probe_knows_what_works():
    out = out_of(EXAMPLES / "backends.py", "drumline", "none")
    assert "drumline: works\n" in out and "none: no: " in out, out


@needs_entry_points
def test_gradients_are_averages_and_weights_those_of_rank_0():
    out = out_of(EXAMPLES / "gradients.py")
    # Samples 1 and 3: (2 (2 - 1) + 6 (6 - 1)) / 2 = 16, and 2 - 16 / 8 = 0.
    for rank, start in enumerate([2, 200]):
        told = re.findall(rf"^rank {rank}: (.*): (\S+)$", out, re.MULTILINE)
        assert [float(value) for _, value in told] == [start, 2, 16, 0, -4, 0.5], out


@needs_entry_points
def test_every_sample_is_dealt_out_once():
    out = out_of(EXAMPLES / "sampler.py", ranks=2)
    everything = str(list(range(0, 160, 10)))
    assert f"epoch 0: all have seen {everything}" in out
    assert f"epoch 1: all have seen {everything}" in out
    of_rank = re.findall(r"epoch (\d): rank 0 has (.*)", out)
    assert len(of_rank) == 4 and of_rank[0][1] != of_rank[2][1], "each epoch has its own order"


@needs_entry_points
def test_the_tutorial_runs():
    out = out_of(EXAMPLES / "tutorial.py")
    assert [line.split(":")[0] for line in out.splitlines()] == ["basic", "checkpoint", "model parallel"]


@needs_entry_points
def test_one_process_and_many_learn_the_same(tmp_path: Path):
    import torch

    for program, start in [("one_process.py", [sys.executable]), ("many_processes.py", TWO_RANKS)]:
        done = subprocess.run(
            [*start, EXAMPLES / program], cwd=tmp_path, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stdout + done.stderr
        model = torch.load(tmp_path / "model.pt")
        found = [model["weight"].item(), model["bias"].item()]
        assert found == pytest.approx([2, 1], abs=0.2), program
        (tmp_path / "model.pt").unlink()


@needs_entry_points
def test_mistakes_are_explained():
    parts = out_of(EXAMPLES / "debugging.py").split("--- ")[1:]
    late, shapes, other, dead, unused = parts
    told = "Rank 1 failed to pass monitoredBarrier|rank 1 has closed the group"
    if VERSION < (2, 14):
        told = "monitored_barrier is only implemented for GLOO"
    assert re.search(f"rank 0: .*({told})", late), late
    for text in (shapes, other):
        for rank in (0, 1):
            assert re.search(rf"^rank {rank}: DistBackendError: .*all_reduce", text, re.MULTILINE), text
    assert "10 f32" in shapes and "20 f32" in shapes and "broadcast" in other
    assert re.search("rank 0: DistBackendError: .*rank 1 has ended", dead), dead
    assert unused.count("a.weight") >= 2, unused


def test_the_template_trains_and_resumes(tmp_path):
    def run(directory, *args):
        where = tmp_path / directory
        out = out_of(
            EXAMPLES / "template.py", DIGITS, "--ddp", "--log-path", where, "--processes", 2, *args
        )
        return dict(re.findall(r"^epoch (\d+): (.*)$", out, re.MULTILINE))

    whole = run("whole", "--epochs", 2)
    resumed = run("resumed", "--epochs", 2, "--resume", tmp_path / "whole" / "checkpoint-0.pth")
    assert resumed == {"1": whole["1"]}
    right = [float(re.search(r"([\d.]+)% right", text).group(1)) for text in whole.values()]
    assert right[1] > 60, whole


@needs_entry_points
def test_the_gpt_resumes_to_the_same_bits(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text((ROOT / "CONTRIBUTING.md").read_text())
    small = "--places 16 --layers 1 --width 16 --batch-size 4 --every 5 --steps 40".split()

    def run(directory, *args):
        where = tmp_path / directory
        out = out_of(
            EXAMPLES / "gpt" / "train.py", text, "--out", where, *small, *args,
            ranks=2,
        )  # fmt: skip
        digests = re.findall(r"^parameters (\w+) after", out, re.MULTILINE)
        assert len(digests) == 2 and digests[0] == digests[1], out
        return digests[0], out

    whole, out = run("whole")
    # From the middle of the second epoch.
    resumed, _ = run("resumed", "--resume", tmp_path / "whole" / "checkpoint-25.pt")
    assert resumed == whole
    losses = [float(loss) for loss in re.findall(r"validation ([\d.]+)", out)]
    assert losses[-1] < losses[0], losses
    if importlib.util.find_spec("matplotlib") is None:
        assert "the loss is not drawn: pip install matplotlib" in out
        return
    picture = (tmp_path / "whole" / "loss.svg").read_text()
    assert picture == (tmp_path / "resumed" / "loss.svg").read_text()
    assert all(text in picture for text in ("validation: ", "loss, nats per character", ">step<"))


def test_the_program_for_gpus_has_the_losses_of_one_process():
    out = out_of(
        ROOT / "examples" / "gpu-check" / "torch_ddp.py",
        *"--device cpu --rounds 2 --steps 2 --width 64 --layers 2".split(),
    )
    ways = ["torch's DDP on gloo", "torch's DDP on drumline", "drumline's DDP"]
    for way in ways:
        apart = re.search(rf"^ +{way}: the losses of one process over 12 steps, at most (\S+) apart$", out, re.MULTILINE)
        assert apart and float(apart.group(1)) < 1e-4, out
    # A row for each way, behind that of a step without communication.
    assert [line[:26].strip() for line in out.splitlines()[-4:]] == ["alone", *ways], out
