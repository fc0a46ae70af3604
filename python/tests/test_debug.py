"""What the wrapper tells with TORCH_DISTRIBUTED_DEBUG, or DRUMLINE_DEBUG, as torch's does."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
from ranks import run

torch = pytest.importorskip("torch")

import drumline  # noqa: E402

SILENT = {"TORCH_DISTRIBUTED_DEBUG": "", "DRUMLINE_DEBUG": "off"}
PROGRAM = """
import torch, drumline
drumline.init_process_group("tcp://127.0.0.1:0", rank=0, world_size=1)

class TwoLinLayerNet(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a = torch.nn.Linear(10, 10, bias=False)
        self.b = torch.nn.Linear(10, 1, bias=False)

    def forward(self, x):
        return self.b(self.a(x))

model = drumline.DistributedDataParallel(TwoLinLayerNet())
model._set_ddp_runtime_logging_sample_rate(15)
for _ in range(20):
    model(torch.randn(4, 10)).sum().backward()
"""


def errors_of(**environment):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120,
        env={**os.environ, **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_nothing_is_told_unless_asked():
    environment = {name: it for name, it in os.environ.items() if name not in SILENT}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, env=environment
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert errors_of(TORCH_DISTRIBUTED_DEBUG="DETAIL", DRUMLINE_DEBUG="off") == ""


@pytest.mark.parametrize("name", ["TORCH_DISTRIBUTED_DEBUG", "DRUMLINE_DEBUG"])
def test_information_is_what_was_initialised(name):
    told = errors_of(**{name: "INFO"})
    assert told.count("[Rank 0]: DDP Initialized with: ") == 1, told
    for line in (
        "backend_name: drumline", "module_name: TwoLinLayerNet", "world_size: 1", "rank: 0",
        "num_parameter_tensors: 2", "total_parameter_size_bytes: 440", "broadcast_buffers: 1",
        "find_unused_parameters: 0", "dtypes: float", "iteration: 0",
    ):  # fmt: skip
        assert f"\n{line}\n" in told, (line, told)
    assert "compute time" not in told


def test_detail_is_also_how_long_the_chosen_steps_took():
    told = errors_of(TORCH_DISTRIBUTED_DEBUG="DETAIL")
    steps = re.findall(r"\[Rank 0 / 1\] \[step (\d+)\] Training TwoLinLayerNet unused_parameter_size=0", told)
    assert [int(step) for step in steps] == [*range(10), 15], told
    for title in (
        "Avg forward compute time", "Avg backward compute time", "Avg backward comm. time",
        "Avg backward comm/comp overlap time",
    ):  # fmt: skip
        times = [int(time) for time in re.findall(rf"\n {re.escape(title)}: (\d+)", told)]
        assert len(times) == 11 and min(times) > 0, told


def to_a_handler(rank, world_size, directory):
    import logging

    class Told(logging.Handler):
        def emit(self, record):
            told.append((record.name, record.levelname, record.getMessage().splitlines()[0]))

    told = []
    logging.getLogger("drumline").addHandler(Told())
    drumline.init_process_group(
        f"file://{directory}/store", rank=rank, world_size=world_size, debug="info"
    )
    model = drumline.DistributedDataParallel(torch.nn.Linear(2, 1))
    model.reducer.stop()
    drumline.destroy_process_group()
    return told


def test_handlers_of_the_program_get_it():
    for rank, told in enumerate(run(2, to_a_handler)):
        assert told == [("drumline.ddp", "INFO", f"[Rank {rank}]: DDP Initialized with: ")]


def test_a_level_that_is_none_is_named():
    with pytest.raises(ValueError, match="debug is .*loud"):
        drumline.init_process_group("tcp://127.0.0.1:0", rank=0, world_size=1, debug="loud")
