"""Ranks as processes of a program."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

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


def listeners(pid):
    """The TCP sockets on which a process listens."""
    inodes = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            inodes.add(os.readlink(descriptor))
    lines = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]
    ]
    return [line[1] for line in lines if line[3] == "0A" and f"socket:[{line[9]}]" in inodes]


def told(rank, reports):
    drumline.init_process_group()
    drumline.barrier()
    names = ("DRUMLINE_STORE", "DRUMLINE_SECRET", "MASTER_ADDR", "MASTER_PORT")
    place = {name: os.environ[name] for name in names if name in os.environ}
    reports.put((place, [listeners("self"), listeners(os.getppid())]))
    drumline.barrier()
    drumline.destroy_process_group()


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_spawned_job_listens_on_no_tcp_port_and_has_a_secret(method, monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "of-an-outer-job")
    reports = multiprocessing.get_context(method).SimpleQueue()
    job = drumline.spawn(told, (reports,), nprocs=2, start_method=method, join=False)
    (first, listening), (second, others) = reports.get(), reports.get()
    assert listening == others == [[], []]
    assert first == second and len(first) == 4
    assert first["MASTER_ADDR"] == "127.0.0.1" and 0 < int(first["MASTER_PORT"]) < 1 << 16
    assert first["DRUMLINE_STORE"].startswith("unix:@") and len(first["DRUMLINE_SECRET"]) == 64
    assert "DRUMLINE_SECRET" not in os.environ
    while not job.join():
        pass


def by_torch(rank, outer, backend):
    import torch
    import torch.distributed as dist

    assert (os.environ["MASTER_PORT"] != outer["MASTER_PORT"]) and "TORCHELASTIC_USE_AGENT_STORE" not in os.environ
    dist.init_process_group(backend)
    data = torch.ones(2) * dist.get_rank()
    dist.all_reduce(data)
    assert data.tolist() == [1, 1] and dist.get_rank() == rank
    dist.destroy_process_group()


# One group in each job: a rank could reach the store of the group before, while rank 0 closes it.
@pytest.mark.parametrize("backend", ["gloo", "drumline"])
def test_torch_connects_spawned_processes(monkeypatch, backend):
    pytest.importorskip("torch")
    outer = {"RANK": "7", "WORLD_SIZE": "9", "MASTER_ADDR": "of-an-outer-job", "MASTER_PORT": "1", "TORCHELASTIC_USE_AGENT_STORE": "True"}  # fmt: skip
    for name, value in outer.items():
        monkeypatch.setenv(name, value)
    drumline.spawn(by_torch, (outer, backend), nprocs=2, start_method="fork")


def test_a_spawned_job_uses_the_users_own_secret(monkeypatch):
    monkeypatch.setenv("DRUMLINE_SECRET", "chosen-by-the-user-0001")
    reports = multiprocessing.get_context("fork").SimpleQueue()
    drumline.spawn(told, (reports,), nprocs=2, start_method="fork")
    assert reports.get()[0]["DRUMLINE_SECRET"] == "chosen-by-the-user-0001"


STRANGER = """
import os, sys, drumline
try:
    drumline.init_process_group(timeout=5)
except drumline.DrumlineError as error:
    sys.exit(f"refused: {error}")
"""


def with_a_stranger(rank, reports):
    if rank == 1:
        for secret in ("guessed-by-a-stranger-1", None):
            variables = {**os.environ, "DRUMLINE_SECRET": secret or ""}
            if secret is None:
                del variables["DRUMLINE_SECRET"]
            done = subprocess.run(
                [sys.executable, "-c", STRANGER], capture_output=True, text=True, env=variables, timeout=60
            )
            reports.put((done.returncode, done.stderr))
    summing(rank, 5)


def test_a_stranger_without_the_secret_is_refused_and_the_job_goes_on():
    reports = multiprocessing.get_context("fork").SimpleQueue()
    drumline.spawn(with_a_stranger, (reports,), nprocs=2, start_method="fork")
    for _ in range(2):
        code, error = reports.get()
        # One is refused by the store; the other is told before it asks.
        assert code == 1 and ("refused: " in error or "asks for the job's secret" in error), error


def failing(rank, how):
    drumline.init_process_group()
    if rank == 1:
        if how == "raises":
            raise RuntimeError("out of patience")
        if how == "exits":
            os._exit(3)
        os.kill(os.getpid(), signal.SIGKILL)
    drumline.barrier()


def test_what_a_process_raises_is_in_the_error_of_the_parent():
    with pytest.raises(drumline.ProcessRaisedException) as raised:
        drumline.spawn(failing, ("raises",), nprocs=2)
    error = raised.value
    assert str(error).startswith("\n\n-- Process 1 terminated with the following error:\nTraceback")
    assert "in failing" in str(error) and str(error).endswith("RuntimeError: out of patience\n")
    assert (error.error_index, error.exit_code) == (1, 1)


@pytest.mark.parametrize(
    ("how", "text", "code", "name"),
    [("exits", "exit code 3", 3, None), ("dies", "signal SIGKILL", -signal.SIGKILL, "SIGKILL")],
)
def test_a_process_without_an_exception_is_blamed_for_what_others_raise(how, text, code, name):
    context = drumline.spawn(failing, (how,), nprocs=2, join=False)
    with pytest.raises(drumline.ProcessExitedException) as raised:
        context.join()
    error = raised.value
    assert str(error) == error.msg == f"process 1 terminated with {text}"
    assert (error.error_index, error.exit_code, error.signal_name) == (1, code, name)
    assert error.pid == error.error_pid == context.pids()[1]
    assert not any(process.is_alive() for process in context.processes)
    with pytest.raises(drumline.ProcessExitedException, match="process 1"):
        context.join()


@pytest.mark.parametrize(
    "error",
    [drumline.ProcessRaisedException("text", 1, 4711), drumline.ProcessExitedException("text", 1, 4711, -9, "SIGKILL")],
)
def test_errors_can_be_sent_to_other_processes(error):
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error) and vars(again) == vars(error)
    assert isinstance(again, drumline.ProcessException)


def raising_much(rank):
    raise RuntimeError("begin" + "x" * 1_000_000 + "end")


def test_a_long_text_is_cut_and_stops_nothing():
    with pytest.raises(drumline.ProcessRaisedException) as raised:
        drumline.spawn(raising_much, nprocs=1, start_method="fork")
    text = str(raised.value)
    assert "begin" in text and "end" in text and " characters ..." in text and len(text) < 40_000


def interrupted(rank):
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell ignores it
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(60)


def test_an_interrupt_of_a_child_is_told_while_the_parent_lives():
    with pytest.raises(drumline.ProcessRaisedException, match="KeyboardInterrupt") as raised:
        drumline.spawn(interrupted, nprocs=1)
    assert raised.value.exit_code == 130


def waiting_for(path):
    while not os.path.exists(path):
        time.sleep(0.01)


def begun_and_waiting(rank, directory):
    Path(directory, f"begun-{rank}").touch()
    waiting_for(f"{directory}/go")


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_join_waits_no_longer_than_it_is_told(method, tmp_path):
    context = drumline.start_processes(
        begun_and_waiting, (str(tmp_path),), nprocs=2, join=False, start_method=method
    )
    assert sorted(context.sentinels.values()) == [0, 1] and all(context.pids())
    assert context.join(timeout=0) is False
    for rank in range(2):
        waiting_for(f"{tmp_path}/begun-{rank}")
    assert context.join(timeout=0.01) is False
    (tmp_path / "go").touch()
    assert context.join() is True
    assert context.join() is True


def outliving(rank, directory, how):
    """Rank 1 fails; rank 0 does what it is told."""
    if rank == 1:
        waiting_for(f"{directory}/ready")
        raise RuntimeError("out of patience")
    if how == "SIGTERM ignored":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if how == "SIGTERM handled":
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(Path(directory, "handled").touch()))
    others = os.getppid()
    Path(directory, "ready").touch()
    while how != "ends by itself" or pids_below(others) != {os.getpid()}:
        time.sleep(0.01)
    Path(directory, "ended by itself").touch()


def pids_below(parent):
    """The processes that this one has started and that live."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            pid, rest = stat.read_text().split(" (", 1)
            state, above = rest.rpartition(") ")[2].split()[:2]
            if int(above) == parent and state != "Z":
                found.add(int(pid))
    return found


@pytest.mark.parametrize(
    ("how", "grace", "trace", "code"),
    [
        ("ends by itself", 60.0, "ended by itself", 0),
        ("SIGTERM handled", None, "handled", 0),
        ("SIGTERM", None, None, -signal.SIGTERM),
        ("SIGTERM ignored", 0.1, None, -signal.SIGKILL),
    ],
)
def test_after_a_failure_the_others_get_time_and_then_signals(how, grace, trace, code, tmp_path):
    # In a program of its own, whose only children are these.
    program = (
        "import drumline, sys, test_spawn\n"
        f"context = drumline.start_processes(test_spawn.outliving, ({str(tmp_path)!r}, {how!r}), 2, False, "
        "start_method='fork')\n"
        "try:\n"
        f"    context.join(grace_period={grace})\n"
        "except drumline.ProcessRaisedException as error:\n"
        "    print(error.error_index, 'out of patience' in str(error), context.processes[0].exitcode)\n"
    )
    assert run_here(["-c", program]).stdout.split() == ["1", "True", str(code)]
    for name in ("ended by itself", "handled"):
        assert (tmp_path / name).exists() == (name == trace)


def run_here(arguments, expected=0, **options):
    """Runs Python where the modules of these tests are found."""
    paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=300,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}, **options,
    )  # fmt: skip
    assert done.returncode == expected, done.stdout + done.stderr
    return done


def stubborn(rank, directory):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Path(directory, f"{rank}").write_text(str(os.getpid()))
    time.sleep(600)


def is_gone(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] in "ZX"
    except OSError:
        return True


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_children_end_with_a_parent_that_is_killed(method, tmp_path):
    program = f"import drumline, test_spawn; drumline.spawn(test_spawn.stubborn, ({str(tmp_path)!r},), 2, start_method={method!r})"
    parent = subprocess.Popen([sys.executable, "-c", program], cwd=Path(__file__).parent)
    files = [tmp_path / "0", tmp_path / "1"]
    eventually(lambda: all(it.exists() and it.read_text() for it in files), parent)
    pids = [int(it.read_text()) for it in files]
    parent.kill()
    parent.wait()
    eventually(lambda: all(is_gone(pid) for pid in pids))


def eventually(holds, process=None):
    until = time.monotonic() + 60  # to tell a hang
    while not holds():
        assert process is None or process.poll() is None, "the program has ended too early"
        assert time.monotonic() < until
        time.sleep(0.02)


def test_a_thread_that_has_started_processes_may_end_before_them(tmp_path):
    contexts = []

    def start():
        contexts.append(drumline.spawn(begun_and_waiting, (str(tmp_path),), nprocs=1, join=False))

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    waiting_for(tmp_path / "begun-0")
    (tmp_path / "go").touch()
    assert contexts[0].join()


UNGUARDED = """
import drumline

def rank(number):
    pass

drumline.spawn(rank, nprocs=1)
"""


def test_a_process_that_fails_before_it_calls_the_function_says_why(tmp_path):
    (tmp_path / "unguarded.py").write_text(UNGUARDED)
    errors = run_here([str(tmp_path / "unguarded.py")], expected=1).stderr
    assert "process 0 terminated with exit code 1 before it called the function" in errors
    assert '`if __name__ == "__main__":`' in errors


def test_what_cannot_be_sent_is_named(capfd):
    for fn, args, text in [
        (lambda rank: None, (), "the function test_what_cannot_be_sent_is_named.<locals>.<lambda> cannot be sent"),
        (failing, ("raises", threading.Lock()), r"argument 1 \(lock\) cannot be sent"),
    ]:
        for method in ("spawn", "forkserver"):
            with pytest.raises(pickle.PicklingError, match=text) as raised:
                drumline.start_processes(fn, args, start_method=method)
            assert 'start_processes(..., start_method="fork")' in str(raised.value)
    assert capfd.readouterr().err == "", "no process has started"


def test_a_fork_calls_any_function():
    reports = multiprocessing.get_context("fork").SimpleQueue()
    drumline.start_processes(lambda rank: reports.put(rank), nprocs=1, start_method="fork")
    assert reports.get() == 0


def test_a_function_of_a_program_without_a_file_is_refused():
    program = "import drumline\ndef f(rank): pass\n"
    errors = run_here(["-c", program + "drumline.spawn(f)"], expected=1).stderr
    assert "cannot import the function f" in errors and "define it in a module" in errors
    run_here(["-c", program + "drumline.start_processes(f, start_method='fork')"])


def test_a_queue_is_sent_to_fresh_processes():
    reports = multiprocessing.get_context("spawn").SimpleQueue()
    drumline.spawn(telling, (reports,), nprocs=1)
    assert reports.get() == 0


def telling(rank, reports):
    reports.put(rank)


def test_the_fork_server_starts_ranks_that_connect():
    drumline.start_processes(summing, (5,), nprocs=2, start_method="forkserver")


def nested(rank):
    drumline.spawn(summing, (rank,), nprocs=2)


def test_ranks_of_ranks_connect_among_themselves():
    drumline.spawn(nested, nprocs=2)


def test_ranks_of_the_launcher_may_spawn():
    program = "import drumline, test_spawn; drumline.spawn(test_spawn.nested, nprocs=2)"
    run_here(["-m", "drumline", "run", "--nproc-per-node", "2", "--", sys.executable, "-c", program])


def test_what_a_failing_rank_has_printed_is_not_lost():
    program = """
import drumline
def f(rank):
    print("a line without an end", end="")
    raise RuntimeError
try:
    drumline.start_processes(f, start_method="fork")
except drumline.ProcessRaisedException:
    pass
"""
    assert run_here(["-c", program]).stdout == "a line without an end"


def losing(rank, seconds):
    drumline.init_process_group()
    if rank == 0:
        drumline.barrier()
    with contextlib.suppress(drumline.DrumlineError):
        drumline.destroy_process_group()
    if seconds is not None:
        time.sleep(seconds)
        raise RuntimeError("out of patience")
    time.sleep(600)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.02, ""), (None, "when it was told to end, because another one had lost it")],
)
def test_a_process_that_has_only_lost_another_one_is_not_blamed(seconds, text):
    with pytest.raises(drumline.ProcessException) as raised:
        drumline.spawn(losing, (seconds,), nprocs=2)
    assert raised.value.error_index == 1 and text in str(raised.value)


LOSING_STATUSES = """
import os, signal, sys, threading, time
import drumline, test_spawn

if __name__ == "__main__":
    if sys.argv[1] == "ignored":
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    else:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD, signal.SIGTERM})
        threading.Thread(target=test_spawn.collecting, daemon=True).start()
    for method, how in (("fork", "well"), ("spawn", "well"), ("forkserver", "well"), ("fork", "exit 0")):
        drumline.start_processes(test_spawn.ending, (how,), 2, start_method=method)
    for method, how in (("fork", "exit 3"), ("spawn", "exit 3"), ("fork", "raise"), ("forkserver", "exit 3")):
        try:
            drumline.start_processes(test_spawn.ending, (how,), 2, start_method=method)
            sys.exit(f"{method}, {how}: no error")
        except drumline.ProcessException as error:
            is_unknown = "How it ended is not known" in str(error)
            knows = error.exit_code == (3 if how == "exit 3" else 1)
            assert error.error_index == 1 and knows != (error.exit_code == 255), (method, how, error.exit_code)
            assert knows or is_unknown or how == "raise", error
            assert how != "raise" or "out of patience" in str(error), error
            assert knows or method != "forkserver"
    context = drumline.start_processes(test_spawn.ending, ("never",), 2, join=False, start_method="fork")
    assert not context.join(0.01)
    context.end(0)
    assert not any(process.is_alive() for process in context.processes)
"""


def collecting():
    """As a library that collects the children of others."""
    while True:
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            time.sleep(0.001)


def ending(rank, how):
    assert os.system("true") == 0, "SIGCHLD is ignored here, too"
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ())
    if how == "never":
        time.sleep(600)
    if rank == 1 and how == "exit 3":
        os._exit(3)
    if rank == 1 and how == "exit 0":
        sys.exit()
    if rank == 1 and how == "raise":
        raise RuntimeError("out of patience")


@pytest.mark.parametrize("statuses", ["ignored", "collected"])
def test_a_program_that_loses_exit_statuses_neither_hangs_nor_takes_a_failure_for_success(statuses, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(LOSING_STATUSES)
    run_here([str(program), statuses])


def leaving(rank, path):
    if os.fork() == 0:
        while not Path(path, "go").exists():
            time.sleep(0.02)
        Path(path, "gone").touch()
        os._exit(0)


def test_join_does_not_wait_for_what_a_process_has_started(tmp_path):
    drumline.start_processes(leaving, (str(tmp_path),), start_method="fork")
    (tmp_path / "go").touch()
    eventually((tmp_path / "gone").exists)
