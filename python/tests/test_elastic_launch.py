"""Ranks that a program launches: `drumline.launch`."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from test_spawn import eventually, is_gone, run_here, waiting_for

import drumline
from drumline.launch import (
    ChildFailedError,
    DefaultLogsSpecs,
    LaunchConfig,
    ProcessFailure,
    SignalException,
    Std,
    elastic_launch,
    record,
)
from drumline.launch.config import flags

AT_ONCE = ["--restart-delay", "0"]


def config(ranks=2, **fields):
    return LaunchConfig(**{"min_nodes": 1, "max_nodes": 1, "nproc_per_node": ranks, "max_restarts": 0, **fields})


def rank():
    return int(os.environ["RANK"])


def sum_of(first, second):
    with drumline.init_process_group() as group:
        data = np.array([rank() + first + second])
        drumline.all_reduce(data)
        assert group.world_size == 3
        return {"sum": data.item()}


def test_results_of_a_function_come_back_by_rank():
    assert elastic_launch(config(3), sum_of)(10, 20) == {n: {"sum": 93} for n in range(3)}


def environment():
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "ROLE_NAME", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_MAX_RESTARTS")
    return [os.environ[name] for name in names]


def test_the_configuration_reaches_the_ranks_and_variables_of_torchrun_do_not(monkeypatch):
    monkeypatch.setenv("PET_NPROC_PER_NODE", "7")
    results = elastic_launch(config(run_id="job", role="trainer", max_restarts=3, options=AT_ONCE), environment)()
    assert results == {n: [str(n), str(n), "2", "trainer", "job", "3"] for n in range(2)}
    virtual = elastic_launch(config(virtual_local_rank=True), environment)()
    assert [place[:2] for place in virtual.values()] == [["0", "0"], ["1", "0"]]


def fails_at_first(directory):
    Path(directory, f"{rank()}-{os.environ['TORCHELASTIC_RESTART_COUNT']}").touch()
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and rank() == 1:
        waiting_for(f"{directory}/0-0")
        raise RuntimeError("once")
    return os.environ["TORCHELASTIC_RESTART_COUNT"]


def test_after_a_restart_results_are_those_of_the_last_world(tmp_path):
    launch = elastic_launch(config(max_restarts=1, options=AT_ONCE), fails_at_first)
    assert launch(str(tmp_path)) == {0: "1", 1: "1"}
    assert len(os.listdir(tmp_path)) == 4


def raises_in_the_last(directory):
    if rank() == 1:
        raise ValueError("out of patience")
    time.sleep(600)


def test_what_a_rank_has_raised_is_in_the_error(tmp_path, capfd):
    before = time.time()
    with pytest.raises(ChildFailedError) as raised:
        elastic_launch(config(), raises_in_the_last)(str(tmp_path))
    error = raised.value
    first, failure = error.get_first_failure()
    assert (error.name, first, list(error.failures)) == ("raises_in_the_last", 1, [1])
    assert (failure.local_rank, failure.exitcode, failure.signal_name()) == (1, 1, "<N/A>")
    assert failure.message["message"] == "ValueError: out of patience"
    assert int(before) <= failure.timestamp <= time.time()
    assert failure.timestamp_isoformat().startswith("20")
    text = str(error)
    assert text.startswith("raises_in_the_last FAILED\nFirst failure:\n"), text
    for part in ("rank      : 1 (local_rank: 1)", f"exitcode  : 1 (pid: {failure.pid})", "in raises_in_the_last"):
        assert part in text, text
    assert "ValueError: out of patience" in text
    # Ranks and launcher print as under `drumline run`.
    assert "drumline: rank 1 (pid" in capfd.readouterr().err
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == text and again.get_first_failure() == (1, failure)


def ends(how):
    if rank() == 1:
        print("almost there", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGSEGV) if how == "dies" else sys.exit(7)
    time.sleep(600)


@pytest.mark.parametrize(
    ("how", "code", "text"), [("dies", -signal.SIGSEGV, "Signal 11 (SIGSEGV) received by PID"), ("exits", 7, "record")]
)
def test_without_an_exception_the_error_has_the_last_lines(how, code, text):
    with pytest.raises(ChildFailedError) as raised:
        elastic_launch(config(), ends)(how)
    first, failure = raised.value.get_first_failure()
    assert (first, failure.exitcode) == (1, code)
    assert text in failure.message and "    almost there" in str(raised.value), str(raised.value)


def all_fail():
    with drumline.init_process_group():
        drumline.barrier()
    raise RuntimeError(f"rank {rank()}")


def test_other_ranks_that_failed_by_themselves_are_named():
    with pytest.raises(ChildFailedError) as raised:
        elastic_launch(config(3, options=["--kill-after", "60s"]), all_fail)()
    first, _ = raised.value.get_first_failure()
    assert f"RuntimeError: rank {first}" in str(raised.value)
    for number in raised.value.failures:
        assert f"rank      : {number} (local_rank: {number})" in str(raised.value)


PROGRAM = """
import sys
print("ran", *sys.argv[1:])
sys.exit(int(sys.argv[1]))
"""


def test_a_command_has_no_results_and_its_failure_is_one(tmp_path, capfd):
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    for command in ([str(script)], [sys.executable, str(script)]):
        capfd.readouterr()
        assert elastic_launch(config(), command[0])(*command[1:], 0, "${local_rank}") == {0: None, 1: None}
        assert sorted(capfd.readouterr().out.split("\n")) == ["", "[0] ran 0 0", "[1] ran 0 1"]
        with pytest.raises(ChildFailedError, match="^.*program.py FAILED") as raised:
            elastic_launch(config(), command[0])(*command[1:], 7)
        assert raised.value.get_first_failure()[1].exitcode == 7


def test_what_the_launcher_refuses_is_an_exception():
    with pytest.raises(ValueError, match="nproc-per-node"):
        elastic_launch(config(0), rank)()
    with pytest.raises(ValueError, match="is it `join_timeout`"):
        elastic_launch(config(2, rdzv_configs={"join_timeuot": 3}), rank)()
    with pytest.raises(FileNotFoundError, match="no-such-program not found"):
        elastic_launch(config(), "no-such-program")()
    with pytest.raises(ValueError, match="entrypoint"):
        elastic_launch(config(), None)()
    with pytest.raises(ValueError, match="start_method"):
        config(start_method="thread")
    with pytest.raises(ValueError, match="non-negative"):
        config(shutdown_timeout=-1)


def a_lock():
    return threading.Lock()


def test_what_cannot_be_sent_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "cloudpickle", None)  # as if it were not installed
    for fn, args, text in [
        (lambda: None, (), "the function .*<lambda> cannot be sent"),
        (environment, (threading.Lock(),), r"argument 0 \(lock\) cannot be sent"),
    ]:
        with pytest.raises(pickle.PicklingError, match=text) as raised:
            elastic_launch(config(), fn)(*args)
        assert "install cloudpickle" in str(raised.value)
    with pytest.raises(ChildFailedError, match="the result of a_lock, a lock, cannot be sent back"):
        elastic_launch(config(1), a_lock)()


def test_cloudpickle_sends_what_pickle_does_not():
    pytest.importorskip("cloudpickle")
    offset = 5
    assert elastic_launch(config(), lambda add: offset + add)(2) == {0: 7, 1: 7}


SCRIPT = """
import os, sys
from drumline.launch import LaunchConfig, elastic_launch

class Result:
    def __init__(self, rank):
        self.rank = rank

def train(add):
    return Result(int(os.environ["RANK"]) + add + len(sys.argv))

if __name__ == "__main__":
    results = elastic_launch(LaunchConfig(1, 1, 2), train)(10)
    print({rank: result.rank for rank, result in results.items()})
"""


def test_functions_and_classes_of_the_program_itself_are_known_to_ranks(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    assert run_here([str(tmp_path / "script.py"), "argument"]).stdout == "{0: 12, 1: 13}\n"
    assert run_here(["-m", "script"], cwd=tmp_path).stdout == "{0: 11, 1: 12}\n"


def test_a_program_without_a_guard_ends_and_says_what_is_missing(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT.replace('if __name__ == "__main__":', "if True:"))
    errors = run_here([str(tmp_path / "script.py")], expected=1).stderr
    assert 'behind `if __name__ == "__main__":`' in errors and "exitcode  : 2" in errors, errors
    assert "drumline: restart" not in errors


def waits(directory):
    # Blocked until it waits: a handler could run just before the wait, which would not end then.
    signal.signal(signal.SIGTERM, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    Path(directory, f"pid-{rank()}").write_text(f"{os.getpid()} {os.getppid()}")
    signal.sigwait([signal.SIGTERM])
    sys.exit(Path(directory, f"terminated-{rank()}").touch())


WAITING = """
import sys
from test_elastic_launch import config, elastic_launch, waits
elastic_launch(config(), waits)(sys.argv[1])
"""


def start_waiting(directory):
    """A program with two ranks that wait; and their process numbers, with that of their keeper."""
    program = subprocess.Popen(
        [sys.executable, "-c", WAITING, str(directory)], cwd=Path(__file__).parent, stderr=subprocess.PIPE, text=True
    )
    files = [directory / "pid-0", directory / "pid-1"]
    eventually(lambda: all(it.exists() and it.read_text() for it in files), program)
    return program, {int(pid) for it in files for pid in it.read_text().split()}


def test_a_signal_to_the_program_ends_the_job(tmp_path):
    program, pids = start_waiting(tmp_path)
    program.send_signal(signal.SIGTERM)
    _, errors = program.communicate(timeout=120)
    assert program.returncode == 1 and "SignalException: the job was ended by SIGTERM" in errors, errors
    assert all(is_gone(pid) for pid in pids)
    assert {"terminated-0", "terminated-1"} <= set(os.listdir(tmp_path))


def test_ranks_end_with_a_program_that_is_killed(tmp_path):
    program, pids = start_waiting(tmp_path)
    program.kill()
    program.communicate(timeout=120)
    eventually(lambda: all(is_gone(pid) for pid in pids))


def signals_launcher(number):
    """Above a rank are the keepers, and above those the launcher."""
    launcher = os.getppid()
    while "keep-ranks" in Path(f"/proc/{launcher}/cmdline").read_text():
        launcher = int(Path(f"/proc/{launcher}/stat").read_text().rpartition(") ")[2].split()[1])
    os.kill(launcher, number)
    time.sleep(600)


def test_the_end_of_the_launcher_itself_is_told():
    with pytest.raises(SignalException, match="the launcher of signals_launcher got SIGTERM") as raised:
        elastic_launch(config(1), signals_launcher)(signal.SIGTERM)
    assert raised.value.sigval == signal.SIGTERM
    with pytest.raises(RuntimeError, match=r"the launcher \(pid \d+\) was killed by signal 9"):
        elastic_launch(config(1), signals_launcher)(signal.SIGKILL)


def hangs():
    drumline.step(0)
    if rank() == 1:
        time.sleep(600)
    for number in range(1, 1000):
        time.sleep(0.1)
        drumline.step(number)


def test_a_rank_that_hangs_is_the_first_failure():
    with pytest.raises(ChildFailedError, match="it hung: ") as raised:
        elastic_launch(config(options=["--step-timeout", "2s"]), hangs)()
    assert raised.value.get_first_failure()[0] == 1


def nested(directory):
    return elastic_launch(config(2, run_id=f"inner-{rank()}"), environment)()


def test_ranks_may_launch_jobs_of_their_own():
    results = elastic_launch(config(2, run_id="outer"), nested)("")
    inner = {n: [[str(k), str(k), "2", "default_role", f"inner-{n}", "0"] for k in range(2)] for n in range(2)}
    assert {n: list(result.values()) for n, result in results.items()} == inner


def sum_of_three():
    return sum_of(0, 0)


def test_ranks_of_the_launcher_may_launch_ranks_that_connect():
    program = "from test_elastic_launch import *; print(elastic_launch(config(3), sum_of_three)()[0])"
    done = run_here(["-m", "drumline", "run", "--", sys.executable, "-c", program])
    assert "{'sum': 3}" in done.stdout


def test_a_thread_may_launch(tmp_path):
    results = []
    thread = threading.Thread(target=lambda: results.append(elastic_launch(config(1), environment)()))
    thread.start()
    thread.join()
    assert results[0][0][0] == "0"


def test_fields_and_defaults_are_those_of_torch():
    torch = pytest.importorskip("torch.distributed.launcher.api")

    def fields(of):
        return [(it.name, it.default) for it in dataclasses.fields(of)]

    *ours, last = fields(LaunchConfig)
    assert last == ("options", ()) and ours == fields(torch.LaunchConfig)


def test_torchs_own_objects_are_taken():
    numa = pytest.importorskip("torch.numa.binding")
    logs = pytest.importorskip("torch.distributed.elastic.multiprocessing")
    specs = logs.DefaultLogsSpecs("logs", redirects=logs.Std.OUT, tee={1: logs.Std.ALL}, local_ranks_filter={1, 0})
    words = flags(config(logs_specs=specs, numa_options=numa.NumaOptions(numa.AffinityMode.SOCKET)))
    for word in ("--log-dir=logs", "--redirects=1", "--tee=1:3", "--local-ranks-filter=0,1", "--numa-binding=socket"):
        assert word in words, words
    assert flags(config(logs_specs=DefaultLogsSpecs("logs", Std.OUT, {1: Std.ALL}, {1, 0}))) == flags(
        config(logs_specs=specs)
    )


def test_fields_become_flags_that_the_launcher_takes():
    full = config(
        max_nodes=4, rdzv_backend="c10d", rdzv_endpoint="host0:29400", run_id="job", local_addr="host1",
        rdzv_configs={"rank": 1, "is_host": False}, rdzv_timeout=60, duplicate_stderr_filters=["a,b", "c"],
        log_line_prefix_template="$rank: ", shutdown_timeout=5, signals_to_handle="SIGTERM,USR1=end",
    )  # fmt: skip
    words = flags(full)
    for word in (
        "--nnodes=1:4", "--rdzv-conf=is_host=0,timeout=60", "--node-rank=1", "--duplicate-stderr-filters=a,,b,c",
        "--shutdown-timeout=5", "--log-line-prefix-template=$rank: ",
    ):  # fmt: skip
        assert word in words, words
    assert drumline._core.refusal(["drumline", "run", *words, "--", "train"]) is None


def raising():
    raise ValueError("out of patience")


def exiting(code):
    sys.exit(code)


def test_record_writes_torchs_error_file(tmp_path, monkeypatch):
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    with pytest.raises(ValueError, match="out of patience"):
        record(raising)()
    message = json.loads(path.read_text())["message"]
    assert message["message"] == "ValueError: out of patience"
    assert "in raising" in message["extraInfo"]["py_callstack"]
    assert abs(int(message["extraInfo"]["timestamp"]) - time.time()) < 60
    assert os.listdir(tmp_path) == ["error.json"]
    path.unlink()
    assert record(exiting)(0) is None
    with pytest.raises(SystemExit):
        record(exiting)(3)
    assert not path.exists()
    # Nobody wants a file.
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE")
    with pytest.raises(ValueError, match="out of patience"):
        record(raising)()


def test_record_passes_on_the_error_file_of_the_rank_that_failed_first(tmp_path, monkeypatch):
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    with pytest.raises(ChildFailedError):
        record(elastic_launch(config(), raises_in_the_last))(str(tmp_path))
    message = json.loads(path.read_text())["message"]
    assert (message["message"], message["errorCode"]) == ("ValueError: out of patience", 1)


def test_a_damaged_error_file_is_quoted(tmp_path):
    for text in ("{", '{"message": 3}', "[]", '{"message": {"message": "x"}}', '{"message": {"extraInfo": 1}}'):
        path = tmp_path / "error.json"
        path.write_text(text)
        failure = ProcessFailure(0, 4711, 1, str(path))
        assert failure.message.startswith("the error file is damaged: ") and text[:1] in failure.message
        assert "damaged" in str(ChildFailedError("train", {0: failure}))


def test_a_pipe_or_a_link_in_place_of_an_error_file_stops_nobody(tmp_path, monkeypatch):
    pipe, link, victim = (tmp_path / name for name in ("pipe", "link", "victim"))
    os.mkfifo(pipe)
    victim.write_text("precious")
    link.symlink_to(victim)
    assert ProcessFailure(0, 4711, 1, str(pipe)).message.startswith("it wrote no error file")
    for path in (pipe, link):
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
        with pytest.raises(ValueError, match="out of patience"):
            record(raising)()
    assert pipe.is_fifo() and victim.read_text() == "precious" and not link.is_symlink()
    assert json.loads(link.read_text())["message"]["message"] == "ValueError: out of patience"


def test_error_files_stay_in_the_directory_for_logs(tmp_path):
    logs = DefaultLogsSpecs(str(tmp_path), tee=Std.ALL)
    with pytest.raises(ChildFailedError) as raised:
        elastic_launch(config(logs_specs=logs, run_id="job"), raises_in_the_last)(str(tmp_path))
    _, failure = raised.value.get_first_failure()
    path = Path(failure.error_file)
    assert path.match("job_*/attempt_0/1/error.json") and path.is_relative_to(tmp_path)
    assert json.loads(path.read_text()) == failure.error_file_data
    assert f"error_file: {path}" in str(raised.value)
    assert "out of patience" in path.with_name("stderr.log").read_text()


def damaging():
    Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text('{"message": ')
    print("almost there", file=sys.stderr, flush=True)
    os._exit(5)


def test_what_a_rank_leaves_in_place_of_an_error_file_is_quoted():
    with pytest.raises(ChildFailedError) as raised:
        elastic_launch(config(1), damaging)()
    _, failure = raised.value.get_first_failure()
    assert failure.message.startswith("the error file is damaged: ") and '{"message": ' in failure.message
    assert "almost there" in str(raised.value) and failure.exitcode == 5


TORCHS = """
from torch.distributed.elastic.multiprocessing.errors import record

@record
def main():
    raise ValueError("out of patience")

main()
"""


def test_torchs_record_is_heard(tmp_path):
    pytest.importorskip("torch")
    (tmp_path / "script.py").write_text(TORCHS)
    with pytest.raises(ChildFailedError, match="in main") as raised:
        elastic_launch(config(1), str(tmp_path / "script.py"))()
    assert raised.value.get_first_failure()[1].message["message"] == "ValueError: out of patience"


HOST = """
import sys
from test_elastic_launch import ChildFailedError, config, elastic_launch, raises_in_the_last, world
two = dict(min_nodes=2, max_nodes=2, rdzv_backend="c10d", rdzv_endpoint=sys.argv[1], run_id="job")
try:
    print(elastic_launch(config(2, **two), raises_in_the_last if sys.argv[2] == "fails" else world)(""))
except ChildFailedError as error:
    print(error)
"""


def world(_):
    return os.environ["RANK"], os.environ["WORLD_SIZE"]


@pytest.mark.parametrize("how", ["succeeds", "fails"])
def test_each_host_gets_the_results_of_its_ranks_and_the_first_failure_of_all(how):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    hosts = [
        subprocess.Popen(
            [sys.executable, "-c", HOST, endpoint, how], cwd=Path(__file__).parent, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, "DRUMLINE_SECRET": "0123456789abcdef" * 2},
        )
        for _ in range(2)
    ]  # fmt: skip
    told = [host.communicate(timeout=120) for host in hosts]
    outputs = sorted("".join(line for line in out.splitlines(True) if line[0] != "[") for out, _ in told)
    assert all(host.returncode == 0 for host in hosts), told
    if how == "succeeds":
        assert outputs == ["{0: ('0', '4'), 1: ('1', '4')}\n", "{2: ('2', '4'), 3: ('3', '4')}\n"], told
    else:
        assert all("rank      : 1 (local_rank: 1)" in it and "ValueError: out of patience" in it for it in outputs), told
        assert sum("on host" in it for it in outputs) == 1, told


def test_torch_reads_our_error_file_and_we_read_torchs(tmp_path, monkeypatch):
    torch = pytest.importorskip("torch.distributed.elastic.multiprocessing.errors")
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    for one in (record, torch.record):
        with pytest.raises(ValueError, match="out of patience"):
            one(raising)()
        theirs, ours = torch.ProcessFailure(0, 1, 1, str(path)), ProcessFailure(0, 1, 1, str(path))
        assert (theirs.message, theirs.timestamp) == (ours.message, ours.timestamp)
        assert theirs.message["message"] == "ValueError: out of patience"
        path.unlink()
