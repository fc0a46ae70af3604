"""torch loads what the GPT in burn exports, and computes the same."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from gpus import TARGET

torch = pytest.importorskip("torch")

ROOT = Path(__file__).parents[2]
PROGRAM = TARGET / "debug" / "gpt-burn"
PLACES, LAYERS, WIDTH = 24, 2, 32

pytestmark = pytest.mark.skipif(
    not PROGRAM.exists(), reason="there is no gpt-burn: cargo build -p gpt-burn"
)


def safetensors(file):
    """The tensors and the metadata of a file."""
    data = file.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    metadata = header.pop("__metadata__")
    types = {"F32": torch.float32, "I64": torch.int64}
    tensors = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        values = bytearray(data[start + begin : start + end])
        tensor = torch.frombuffer(values, dtype=types[entry["dtype"]])
        tensors[name] = tensor.reshape(entry["shape"])
    return tensors, metadata


def test_torch_has_the_same_logits(tmp_path, monkeypatch):
    text = ROOT / "CONTRIBUTING.md"
    subprocess.run(
        [PROGRAM, text, "--steps", "5", "--lr", "0.01", "--batch-size", "4", "--out", tmp_path / "out"]
        + ["--places", str(PLACES), "--layers", str(LAYERS), "--width", str(WIDTH)]
        + ["--export", tmp_path / "model", "--logits", tmp_path / "logits"],
        check=True, capture_output=True,
    )  # fmt: skip
    monkeypatch.syspath_prepend(ROOT / "examples" / "python" / "gpt")
    for name in ("model", "text"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    from model import Gpt
    from text import Text

    read = Text(str(text))
    tensors, metadata = safetensors(tmp_path / "model")
    assert metadata["alphabet"] == "".join(read.alphabet)
    model = Gpt(len(read.alphabet), PLACES, LAYERS, WIDTH)
    model.load_state_dict(tensors)  # strict: every name, every shape

    theirs, _ = safetensors(tmp_path / "logits")
    assert torch.equal(theirs["characters"][0], read.characters[:PLACES])
    with torch.no_grad():
        ours = model(theirs["characters"])
    assert theirs["scores"].std() > 0.1, "all scores are alike"
    difference = (ours - theirs["scores"]).abs().max().item()
    print(f"logits differ by at most {difference:.1e}")
    assert difference < 1e-4
