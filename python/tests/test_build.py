"""What pip says where the package cannot be built."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

BUILD = Path(__file__).parents[1] / "build"


def test_without_cargo_one_sentence_names_the_wheel(tmp_path: Path):
    # As pip does: it imports the module that pyproject.toml names.
    done = subprocess.run(
        [sys.executable, "-c", "import drumline_build"],
        env={**os.environ, "PATH": str(tmp_path), "PYTHONPATH": str(BUILD)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    for part in ("no cargo on the PATH", "https://rustup.rs", f"{os.uname().machine}.whl", "make wheel"):
        assert part in done.stderr, done.stderr
    assert "Traceback" not in done.stderr


def test_other_systems_get_a_sentence(tmp_path: Path, monkeypatch):
    cargo = tmp_path / "cargo"
    cargo.write_text("#!/bin/sh\n")
    cargo.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(BUILD))
    import drumline_build

    assert drumline_build.obstacle("Linux", True, "cargo") is None
    for system, is_64_bit in (("Darwin", True), ("Windows", True), ("Linux", False)):
        assert "64-bit Linux only" in drumline_build.obstacle(system, is_64_bit, "cargo")
