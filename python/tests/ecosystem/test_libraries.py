"""The examples for libraries on top of torch print the same numbers on drumline as on gloo."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import pytest
from torch_versions import needs_backends, since

pytest.importorskip("torch")
pytestmark = needs_backends

EXAMPLES = Path(__file__).parents[3] / "examples" / "python" / "ecosystem"
ON_EACH_BACKEND = Path(__file__).with_name("on_each_backend.py")
NUMBER = re.compile(r"-?\d+\.\d+(?:e[+-]\d+)?")
LAUNCHER = [sys.executable, "-m", "drumline", "run", "--nproc-per-node"]
REPLACES = {"DRUMLINE_REPLACE_GLOO": "1"}
# To tell a hang from a busy machine.
LIMIT_S = 600


def needs(library):
    is_here = importlib.util.find_spec(library) is not None
    return pytest.mark.skipif(not is_here, reason=f"{library} is not installed: make ecosystem")


ranks = pytest.mark.parametrize("ranks", [2, 3])


def start(command, **environment):
    return subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, timeout=LIMIT_S,
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", **environment},
    )  # fmt: skip


def run(command, trace=None, **environment):
    """What a program prints. With ``trace`` it must have called drumline on so many ranks, else on none."""
    with tempfile.TemporaryDirectory() as directory:
        done = start(command, DRUMLINE_TRACE=directory, **environment)
        assert done.returncode == 0, done.stdout + done.stderr
        files = list(Path(directory).glob("rank-*.json"))
        assert len(files) == (trace or 0), (files, done.stdout, done.stderr)
        assert all('"collective"' in file.read_text() for file in files), done.stdout + done.stderr
    return done.stdout


def launch(ranks, *command, trace=None, **environment):
    """What rank 0 prints, without the launcher's mark."""
    out = run([*LAUNCHER, ranks, "--", sys.executable, *command], trace, **environment)
    return "".join(re.findall(r"^\[0\] (.*\n)", out, re.MULTILINE))


@cache
def on_both(name, ranks):
    """What an example prints on drumline and on gloo."""
    command = [ON_EACH_BACKEND, "drumline,gloo", EXAMPLES / f"with_{name}.py", "BACKEND"]
    return re.split(r"^on \w+:\n", launch(ranks, *command, trace=ranks), flags=re.MULTILINE)[1:]


def assert_same(ours, theirs):
    """The same text, and numbers that differ by at most a millionth."""
    assert NUMBER.sub("#", ours) == NUMBER.sub("#", theirs)
    numbers = [float(number) for number in NUMBER.findall(ours)]
    assert len(numbers) >= 3, ours
    others = [float(number) for number in NUMBER.findall(theirs)]
    assert numbers == pytest.approx(others, rel=1e-6, abs=1e-8)


@ranks
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("accelerate", marks=needs("accelerate")),
        pytest.param("fabric", marks=needs("lightning")),
        pytest.param("lightning", marks=needs("lightning")),
        pytest.param("torchmetrics", marks=needs("torchmetrics")),
        pytest.param("transformers", marks=needs("transformers")),
    ],
)
def test_by_name(name, ranks):
    assert_same(*on_both(name, ranks))


@ranks
@needs("ignite")
def test_ignite_in_the_place_of_gloo(ranks):
    program = EXAMPLES / "with_ignite.py"
    ours = launch(ranks, program, trace=ranks, **REPLACES)
    assert_same(ours, launch(ranks, program))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("accelerate", marks=needs("accelerate")),
        pytest.param("transformers", marks=needs("transformers")),
    ],
)
def test_in_the_place_of_gloo(name):
    ours = launch(2, EXAMPLES / f"with_{name}.py", "gloo", trace=2, **REPLACES)
    assert_same(ours, on_both(name, 2)[1])


@since(2, 8, what="FSDP2 on the CPU")
def test_three_ranks_load_what_two_have_saved(tmp_path):
    command = [ON_EACH_BACKEND, "drumline,gloo", EXAMPLES / "with_checkpoints.py", "--backend=BACKEND"]
    parts = []
    for ranks, resume in [(2, []), (3, ["--resume"])]:
        out = launch(ranks, *command, f"{tmp_path}/BACKEND", *resume, trace=ranks)
        parts.append(re.split(r"^on \w+:\n", out, flags=re.MULTILINE)[1:])
    (ours, theirs), (ours_resumed, theirs_resumed) = parts
    assert ours.count("step 5: ") == 1 and ours_resumed.startswith("step 6: "), parts
    assert_same(ours + ours_resumed, theirs + theirs_resumed)


@ranks
@needs("ray")
def test_ray(ranks):
    command = [sys.executable, EXAMPLES / "with_ray.py", "--workers", ranks, "--backend"]
    # Where Ray keeps its logs and a token. Paths of its sockets must be short.
    with tempfile.TemporaryDirectory(dir="/tmp") as home:
        places = {"HOME": home, "RAY_TMPDIR": home}
        ours = run([*command, "drumline"], trace=ranks, **places)
        theirs = run([*command, "gloo"], **places)
    # Beside what the workers print.
    ours, theirs = ("".join(re.findall("^epoch .*\n", it, re.MULTILINE)) for it in (ours, theirs))
    assert ours.count(" on drumline\n") == theirs.count(" on gloo\n") == 3, ours + theirs
    assert_same(ours.replace(" on drumline\n", " on gloo\n"), theirs)


@ranks
@needs("pyspark")
@pytest.mark.skipif(not shutil.which("java"), reason="Spark needs Java 17")
def test_spark(ranks):
    command = [sys.executable, EXAMPLES / "with_spark.py", "--workers", ranks, "--backend"]
    assert_same(run([*command, "drumline"], trace=ranks), run([*command, "gloo"]))


@pytest.mark.parametrize(
    ("script", "ranks"),
    # One part of test_script deals two rows out to all ranks, so on 3 it fails on any backend.
    [("test_script", 2), ("test_ops", 2), ("test_ops", 3), ("test_sync", 2), ("test_sync", 3)],
)
@needs("accelerate")
def test_accelerates_own_scripts(script, ranks):
    program = (
        # test_ops asks for no CPU: on a machine without GPUs each rank would be alone.
        "from accelerate import PartialState; PartialState(cpu=True); "
        f"from accelerate.test_utils.scripts.{script} import main; main()"
    )
    launch(ranks, "-c", program, trace=ranks, ACCELERATE_USE_CPU="true", **REPLACES)


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(
            "from accelerate import PartialState; PartialState(cpu=True, backend='drumline')",
            marks=needs("accelerate"),
        ),
        pytest.param(
            "from ignite.distributed import Parallel; Parallel(backend='drumline')",
            marks=needs("ignite"),
        ),
    ],
)
def test_a_library_that_refuses_the_name_gets_a_hint(program):
    done = start([*LAUNCHER, 2, "--", sys.executable, "-c", program])
    assert done.returncode == 1, done.stdout + done.stderr
    assert "hint: this library takes only names that it knows" in done.stderr, done.stderr
