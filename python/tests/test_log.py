"""The core's log in Python: a late rank is named, whatever the program does meanwhile."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch_versions import needs_backends

PROGRAM = str(Path(__file__).with_name("late.py"))

# To tell a hang from a slow machine.
LIMIT_S = 120.0


def ranks(what, directory, **environment):
    """Runs two ranks, of which rank 1 is 4 s late. What rank 0 prints, on stdout and stderr."""
    processes = [
        subprocess.Popen(
            [sys.executable, PROGRAM, what, str(rank), str(directory)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, **environment},
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        printed = [process.communicate(timeout=LIMIT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0, 0], printed
    return printed[0]


def names_the_late_rank(text):
    return "has been waiting for" in text and "rank=0" in text and "late=[1]" in text


def test_a_late_rank_is_named_on_stderr(tmp_path):
    out, errors = ranks("direct", tmp_path)
    assert out == ""
    first, *others = errors.splitlines()
    assert first.startswith("drumline WARNING: all_reduce"), errors
    assert names_the_late_rank(first), errors
    assert len(others) == 1 and "has gone on after" in others[0], errors


@needs_backends
def test_a_late_rank_is_named_through_torch(tmp_path):
    _, errors = ranks("through_torch", tmp_path)
    assert names_the_late_rank(errors), errors


def test_handlers_of_the_program_get_the_log_and_then_stderr_does_not(tmp_path):
    out, errors = ranks("to_a_handler", tmp_path)
    first = out.splitlines()[0]
    assert first.startswith("told drumline.engine.lane.waiting WARNING: all_reduce"), out
    assert names_the_late_rank(first) and errors == "", out + errors
    assert "INFO" not in out and "DEBUG" not in out, out


@pytest.mark.parametrize(
    ("what", "environment", "is_informed"),
    [
        ("as_information", {}, True),
        ("to_a_handler", {"RUST_LOG": "drumline=info"}, True),
        ("to_a_handler", {"RUST_LOG": "drumline=info,drumline_engine=warn"}, False),
        ("to_a_handler", {"RUST_LOG": "elsewhere=debug"}, False),
    ],
)
def test_the_level_is_that_of_the_logger_or_of_the_environment(
    tmp_path, what, environment, is_informed
):
    out, errors = ranks(what, tmp_path, **environment)
    assert ("told drumline.engine.start_up.mesh INFO" in out) == is_informed, out + errors
    assert names_the_late_rank(out) and "DEBUG" not in out, out


def test_the_environment_shows_more_than_warnings_without_a_handler(tmp_path):
    _, errors = ranks("direct", tmp_path, RUST_LOG="drumline=info")
    assert "drumline INFO: " in errors and names_the_late_rank(errors), errors


def test_a_level_may_silence_it(tmp_path):
    assert ranks("as_errors_only", tmp_path) == ("", "")
    (tmp_path / "again").mkdir()
    assert ranks("direct", tmp_path / "again", RUST_LOG="off") == ("", "")


def test_no_thread_of_the_core_waits_for_the_interpreter_and_forks_go_on(tmp_path):
    out, errors = ranks("while_python_is_busy", tmp_path)
    assert out == "fork ended with 0\n", out + errors
    assert errors.count("has been waiting for") == 1, errors


def test_a_program_that_ends_is_told_all_and_does_not_hang(tmp_path):
    out, errors = ranks("and_ends", tmp_path)
    assert names_the_late_rank(out), out + errors
    assert errors == "", errors
