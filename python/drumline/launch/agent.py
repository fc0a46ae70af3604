"""Launches ranks from a program: torch's ``elastic_launch``."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from drumline import _core
from drumline.launch import config as _config
from drumline.launch import function
from drumline.launch.config import LaunchConfig
from drumline.launch.failures import NOT_AVAILABLE, ChildFailedError, ProcessFailure


class SignalException(Exception):
    """A signal to this process has ended the job."""

    def __init__(self, msg: str, sigval: signal.Signals) -> None:
        super().__init__(msg)
        self.sigval = sigval

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.args[0], self.sigval)


class elastic_launch:
    """Runs a function, or a program, once per rank, and returns the results by rank. ::

        results = elastic_launch(config, train)(data, 3)            # train(data, 3) in every rank
        elastic_launch(config, "train.py")("--epochs", "3")         # results are None

    A function and its arguments are pickled, and so are its results. What pickle cannot send (lambdas, functions of
    notebooks) is sent by cloudpickle, if that is installed.

    Raises `ChildFailedError` if ranks have failed and no restart is left, `SignalException` if a signal of
    ``signals_to_handle`` has ended the job, and `ValueError` if the configuration contradicts itself. With several
    hosts each host calls this, and gets the results of its own ranks. A rank that was lost has none.
    """

    def __init__(self, config: LaunchConfig, entrypoint: Callable[..., Any] | str | None) -> None:
        self._config, self._entrypoint = config, entrypoint

    def __call__(self, *args: Any) -> dict[int, Any]:
        return launch_agent(self._config, self._entrypoint, args)


def launch_agent(
    config: LaunchConfig, entrypoint: Callable[..., Any] | str | None, args: Sequence[Any]
) -> dict[int, Any]:
    """``elastic_launch(config, entrypoint)(*args)``."""
    if not entrypoint:
        raise ValueError("the entrypoint is missing: give a function, or the name of a program")
    with tempfile.TemporaryDirectory(prefix="drumline-launch-", ignore_cleanup_errors=True) as name:
        directory = Path(name)
        if callable(entrypoint):
            command = function.send(entrypoint, args, directory)
        else:
            command = [os.fspath(entrypoint), *(str(arg) for arg in args)]
        outcome = _launch(config, command, directory)
        if outcome["exit_code"] != 0:
            raise _error(outcome, _name(entrypoint, args))
        ranks = [(it["rank"], it["local_rank"]) for it in outcome["ranks"] if not it["lost"]]
        return {rank: function.result(directory, local_rank) for rank, local_rank in ranks}


def _launch(config: LaunchConfig, command: list[str], directory: Path) -> dict[str, Any]:
    """Runs the launcher, and returns how the job has ended."""
    path = directory / "outcome.json"
    arguments = ["run", *_config.flags(config), f"--report={path}", "--", *command]
    if why := _core.refusal(["drumline", *arguments]):
        raise ValueError(why)
    # Ctrl-C at the terminal reaches this process alone, which passes it on.
    with _PassedOn(config.signals_to_handle) as signals:
        process = subprocess.Popen(
            [sys.executable, "-m", "drumline._launcher", str(os.getpid()), str(directory), *arguments],
            stdin=subprocess.DEVNULL, env=_environment(), start_new_session=True,
        )  # fmt: skip
        try:
            signals.to(process)
            code = process.wait()
        except BaseException:
            process.terminate()
            process.wait()
            raise
    if signals.arrived is not None:
        raise SignalException(f"the job was ended by {signals.arrived.name}", signals.arrived)
    if not path.exists():
        how = f"exited with code {code}" if code >= 0 else f"was killed by signal {-code}"
        raise RuntimeError(f"the launcher (pid {process.pid}) {how}; its stderr may say why")
    outcome: dict[str, Any] = json.loads(path.read_text())
    return outcome


def _environment() -> dict[str, str]:
    """The launcher's environment: the configuration says everything."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PET_")}
    # The launcher would write there what is no error of this process yet: `record` decides.
    environment.pop("TORCHELASTIC_ERROR_FILE", None)
    environment.setdefault("PYTHON_EXEC", sys.executable)
    return environment


def _error(outcome: dict[str, Any], name: str) -> Exception:
    if outcome["error"] is not None:
        kind = {126: PermissionError, 127: FileNotFoundError}.get(outcome["exit_code"], RuntimeError)
        return kind(outcome["error"])
    if outcome["stopped_by"] is not None:
        text = f"the launcher of {name} got {outcome['stopped_by']}"
        sigval = signal.Signals.__members__.get(outcome["stopped_by"])
        return RuntimeError(text) if sigval is None else SignalException(text, sigval)
    first, failures = outcome["first_failure"], {}
    for it in outcome["ranks"]:
        if it["rank"] != first and (it["told"] or it["exit_code"] in (0, None)):
            continue
        failure = ProcessFailure(
            it["local_rank"], it["pid"], 1 if it["exit_code"] is None else it["exit_code"],
            it["error_file"] or NOT_AVAILABLE, it["error"] or _hung(it["hung"]), it["ended_at"],
            outcome["stderr"] if it["rank"] == first else [],
        )  # fmt: skip
        failures[it["rank"]] = failure
    if other := outcome["elsewhere"]:
        text = f"on host {other['host']}: {other['text']}"
        failures[first] = ProcessFailure(
            other["local_rank"], other["pid"], other["exit_code"], NOT_AVAILABLE, {"message": text}, other["ended_at"]
        )
    if first not in failures:
        return RuntimeError(f"{name} failed; the lines of the launcher on stderr say why")
    return ChildFailedError(name, failures, first)


def _hung(how: str | None) -> dict[str, Any] | None:
    return None if how is None else {"message": f"it hung: {how}"}


def _name(entrypoint: Callable[..., Any] | str, args: Sequence[Any]) -> str:
    """What to call the job: the function, or the script if the program is the interpreter."""
    if callable(entrypoint):
        return getattr(entrypoint, "__name__", repr(entrypoint))
    if entrypoint != sys.executable:
        return entrypoint
    return next((str(arg) for arg in args if not str(arg).startswith("-")), "")


class _PassedOn:
    """Meanwhile the signals to this process go to the launcher. Python has handlers in the main thread only."""

    def __init__(self, names: str) -> None:
        self._names = [name.partition("=") for name in names.split(",") if name]
        self._process: subprocess.Popen[bytes] | None = None
        self._early: list[int] = []
        self._before: dict[int, Any] = {}
        self.arrived: signal.Signals | None = None
        """The first one that ends the job."""

    def to(self, process: subprocess.Popen[bytes]) -> None:
        """From now on they go to this process."""
        self._process = process
        for number in self._early:
            process.send_signal(number)

    def __enter__(self) -> _PassedOn:
        if threading.current_thread() is threading.main_thread():
            for name, _, meaning in self._names:
                number = signal.Signals[name if name.startswith("SIG") else f"SIG{name}"]
                ends = meaning != "pass"
                self._before[number] = signal.signal(number, self._ends if ends else self._passes)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ends(self, number: int, frame: FrameType | None) -> None:
        self.arrived = self.arrived or signal.Signals(number)
        self._passes(number, frame)

    def _passes(self, number: int, _: FrameType | None) -> None:
        if self._process is None:
            self._early.append(number)
        else:
            self._process.send_signal(number)
