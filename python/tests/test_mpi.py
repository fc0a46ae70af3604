"""Ranks that an MPI has started: drumline's own API and torch's, over MPI and over drumline."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from torch_versions import needs_backends, needs_entry_points

HERE = Path(__file__).parent

# Prefixes with bin and lib, and colons between them.
VARIABLE = "DRUMLINE_TEST_MPI"
PREFIXES = [Path(it) for it in os.environ.get(VARIABLE, "").split(":") if it]

# Signals to a rank in a call. The long form is for `make soak`: DRUMLINE_SOAK=1.
TRIALS = 200 if os.environ.get("DRUMLINE_SOAK", "0") != "0" else 4

# To tell a hang from a slow machine.
LIMIT_S = 300.0

# Variables of a launcher around the tests.
OUTER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "DRUMLINE_BACKEND")


def name_of(prefix):
    return prefix.name if prefix else "none"


@pytest.fixture(params=PREFIXES or [None], ids=name_of)
def mpi(request):
    if request.param is None:
        pytest.skip(f"{VARIABLE} names no MPI")
    return request.param


def under_one_mpi(nth):
    """Under the MPI of this number, counted round; under the others it is slow: every rank imports torch, which takes 10
    to 20 seconds of processor time."""
    cases = [
        pytest.param(prefix, marks=[] if at == nth % len(PREFIXES) else [pytest.mark.slow])
        for at, prefix in enumerate(PREFIXES)
    ]
    return pytest.mark.parametrize("mpi", cases or [None], indirect=True, ids=name_of)


def under(prefix, ranks, *command, **variables):
    """What the command prints under mpiexec, and the exit code of mpiexec."""
    is_open_mpi = (prefix / "lib/libmpi.so.40").exists()
    is_4 = (prefix / "lib/libopen-rte.so.40").exists()  # it spells the option in its own way
    crowd = ["--oversubscribe"] if is_4 else ["--map-by", ":OVERSUBSCRIBE"]
    flags = [*crowd, "--bind-to", "none"] if is_open_mpi else []
    environment = {name: it for name, it in os.environ.items() if name not in OUTER}
    environment |= {
        "PATH": f"{prefix}/bin:{os.environ['PATH']}",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_ALLOW_RUN_AS_ROOT": "1",
        "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMP_NUM_THREADS": "1",
    }
    if (prefix / "lib/libmpi_ilp64.so").exists():
        environment |= {
            "I_MPI_ROOT": str(prefix),
            "LD_LIBRARY_PATH": f"{prefix}/lib",
            "I_MPI_FABRICS": "shm",
            "I_MPI_PIN": "0",
        }
    return subprocess.run(
        [str(prefix / "bin/mpiexec"), "-n", str(ranks), *flags, *map(str, command)],
        env=environment | variables, capture_output=True, text=True, timeout=LIMIT_S,
    )  # fmt: skip


def program(prefix, ranks, name, *arguments, **variables):
    """The lines that ranks print in a function of under_mpi.py. All must end well."""
    script = HERE / "under_mpi.py"
    done = under(prefix, ranks, sys.executable, script, name, *arguments, **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    return sorted(done.stdout.splitlines())


def test_the_own_api_needs_no_address_rank_or_size(mpi):
    for how in ("backend", "url", "init_method"):
        expected = [f"rank {rank} of 4 on mpi: fine" for rank in range(4)]
        assert program(mpi, 4, "own_api", how) == expected


def test_a_program_may_end_without_taking_leave(mpi):
    assert program(mpi, 3, "takes_no_leave") == ["sum 3.0"] * 3


def test_all_reduce_has_the_bits_of_drumline(mpi):
    bits = program(mpi, 4, "bits", "mpi")
    assert bits == program(mpi, 4, "bits", "drumline") and len({*bits}) == 1


def test_a_rank_that_raises_is_named_and_the_job_ends(mpi):
    done = under(mpi, 3, sys.executable, HERE / "under_mpi.py", "one_raises")
    said = done.stdout + done.stderr
    assert done.returncode != 0, said
    assert "out of patience" in said
    # A launcher may kill the others before they have said it.
    others = [line for line in said.splitlines() if line.startswith("heard: ")]
    assert all("rank 1" in line for line in others), said


def test_a_program_ends_in_a_handler_of_sigterm(mpi):
    took = []
    for seed in range(TRIALS):
        signalled = [(0,), (0, 1), (1,), (1, 0)][seed % 4]
        done = under(mpi, 2, sys.executable, HERE / "under_mpi.py", "told_to_end", seed, *signalled)
        said = dict(re.findall(r"^rank (\d): (.+)", done.stdout, re.MULTILINE))
        assert said.keys() == {"0", "1"}, done.stdout + done.stderr
        for rank, line in said.items():
            seconds, ends = line.split(" s, ")
            # Of two that are signalled one may hear of the other before its own signal.
            right = {"in the handler", "in the handler, told"} if int(rank) in signalled else set()
            right |= {"after a failed call"} if len(signalled) == 2 or int(rank) not in signalled else set()
            assert ends in right, f"trial {seed}, signalled {signalled}, rank {rank}: {line}"
            took.append(float(seconds))
    late = sum(it > 1 for it in took)
    print(f"{name_of(mpi)}: {TRIALS} signals, worst {max(took):.2f} s, {late} later than 1 s")


def test_what_mpi_knows_must_not_be_typed(mpi):
    lines = program(mpi, 2, "typed")
    assert len(lines) == 4  # two ways, two ranks
    for line in lines:
        assert "mpi:// takes nothing" in line and "MPI knows the ranks" in line, line


@needs_backends
@under_one_mpi(0)
def test_torch_over_mpi(mpi):
    pytest.importorskip("torch")
    expected = [f"rank {rank} of 3 on mpi: fine" for rank in range(3)]
    assert program(mpi, 3, "torch_api") == expected


@needs_backends
@under_one_mpi(1)
def test_torch_may_meet_by_mpi_and_use_drumline(mpi):
    pytest.importorskip("torch")
    expected = [f"rank {rank} of 3 on drumline: fine" for rank in range(3)]
    assert program(mpi, 3, "torch_api", DRUMLINE_BACKEND="drumline") == expected


@needs_backends
@pytest.mark.parametrize("backend", ["drumline", pytest.param("mpi", marks=pytest.mark.slow)])
@under_one_mpi(1)
def test_a_script_of_torchrun_under_drumline_env(mpi, backend):
    pytest.importorskip("torch")
    command = [sys.executable, "-m", "drumline", "env", "--", sys.executable, HERE / "under_mpi.py"]
    done = under(mpi, 3, *command, "torchruns_script", DRUMLINE_BACKEND=backend)
    assert done.returncode == 0, done.stdout + done.stderr
    expected = [f"rank {rank} of 3 on {backend}: fine" for rank in range(3)]
    assert sorted(done.stdout.splitlines()) == expected


def test_a_library_beside_python_is_found(mpi, tmp_path):
    """As `pip install mpich` puts it there: the environment says nothing of it."""
    (tmp_path / "lib").symlink_to(mpi / "lib")
    code = (
        f"import sys; sys.prefix = {str(tmp_path)!r}; import drumline; print(drumline.is_mpi_available())"
    )
    hidden = ("VIRTUAL_ENV", "I_MPI_ROOT", "DRUMLINE_MPI_LIBRARY")
    environment = {name: it for name, it in os.environ.items() if name not in hidden}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment | {"PATH": "/nowhere"},
        capture_output=True, text=True, timeout=LIMIT_S,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr


@needs_backends
@needs_entry_points
@pytest.mark.parametrize("by_env", [False, pytest.param(True, marks=pytest.mark.slow)])
@under_one_mpi(2)
def test_the_gpt_gets_the_bits_that_it_has_under_drumline_run(mpi, by_env, tmp_path):
    pytest.importorskip("torch")
    text = tmp_path / "text.txt"
    text.write_text((HERE.parents[1] / "CONTRIBUTING.md").read_text())
    script = HERE.parents[1] / "examples/python/gpt/train.py"
    small = "--places 16 --layers 1 --width 16 --batch-size 4 --every 5 --steps 10".split()
    gpt = [sys.executable, script, text, "--out", tmp_path / "out", *small]
    drumline = [sys.executable, "-m", "drumline"]

    def digests(done):
        assert done.returncode == 0, done.stdout + done.stderr
        return set(re.findall(r"parameters (\w+) after", done.stdout))

    run = [*drumline, "run", "--nproc-per-node", "2", "--", *gpt]
    expected = digests(subprocess.run([*map(str, run)], capture_output=True, text=True, timeout=LIMIT_S))
    assert len(expected) == 1
    command = [*drumline, "env", "--", *gpt] if by_env else [*gpt, "--init-method", "mpi://"]
    assert digests(under(mpi, 2, *command)) == expected
