"""What ranks failed of."""

from __future__ import annotations

import json
import signal
import socket
import time
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

_NOT_AVAILABLE = "<N/A>"

_HOW_TO_SEE_MORE = "it wrote no error file: decorate its main function with drumline.launch.record to see its traceback"


@dataclass
class ProcessFailure:
    """How a rank failed. torch's class has the same fields up to ``timestamp``."""

    local_rank: int
    pid: int
    exitcode: int
    """-n if signal n has killed it."""
    error_file: str
    """``<N/A>`` if it wrote none."""
    error_file_data: dict[str, Any] = field(init=False, default_factory=dict)
    message: Any = field(init=False, default="")
    """The text; with an error file, what that has under ``message``."""
    timestamp: int = field(init=False, default=0)
    """When it happened, in seconds since 1970."""
    ended_at: float | None = None
    """When the process ended, if the launcher knows it."""
    host: str = ""
    stderr: list[str] = field(default_factory=list)
    """The last lines of its stderr, if it was the first one."""

    def __post_init__(self) -> None:
        self.host = self.host or socket.gethostname()
        self.timestamp = int(time.time() if self.ended_at is None else self.ended_at)
        self.error_file_data = {"message": "<NONE>"}
        try:
            with open(self.error_file, errors="replace") as file:
                text = file.read()
        except OSError:
            self.error_file = _NOT_AVAILABLE
        else:
            self._take(text)
        if not self.message:
            signalled = f"Signal {-self.exitcode} ({self.signal_name()}) received by PID {self.pid}"
            self.message = signalled if self.exitcode < 0 else _HOW_TO_SEE_MORE

    def _take(self, text: str) -> None:
        """A damaged file is quoted."""
        try:
            data = json.loads(text)
            message = data["message"]
            extra = data if isinstance(message, str) else message["extraInfo"]
            self.timestamp = int(extra.get("timestamp") or self.timestamp)
            self.error_file_data, self.message = data, message
        except (ValueError, TypeError, KeyError, AttributeError):
            self.message = f"the error file is damaged: {text[:1000]!r}"

    def signal_name(self) -> str:
        """``SIGKILL``, for example; ``<N/A>`` if it was no signal."""
        try:
            return signal.Signals(-self.exitcode).name
        except ValueError:
            return _NOT_AVAILABLE

    def timestamp_isoformat(self) -> str:
        """The time as ``2026-01-31_12:00:00``."""
        return datetime.fromtimestamp(self.timestamp).isoformat(sep="_")

    def text(self) -> str:
        """The traceback, or what is known in its place."""
        if not isinstance(self.message, dict):
            return str(self.message)
        extra = self.message.get("extraInfo") or {}
        return str(extra.get("py_callstack") or self.message.get("message") or _NOT_AVAILABLE)


class ChildFailedError(Exception):
    """Ranks have failed. The text begins with the one that failed first."""

    def __init__(
        self, name: str, failures: dict[int, ProcessFailure], first: int | None = None
    ) -> None:
        if not failures:
            raise ValueError("failures is empty")
        self.name = name
        """The function, or the program."""
        self.failures = failures
        """By rank: those that failed by themselves, not those that were ended because of them."""
        self._first = first
        super().__init__(self.format_msg())

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.name, self.failures, self._first)

    def get_first_failure(self) -> tuple[int, ProcessFailure]:
        """The rank that failed first, and how."""
        rank = self._first
        if rank is None:
            rank = min(self.failures, key=lambda it: self.failures[it].timestamp)
        return rank, self.failures[rank]

    def format_msg(self) -> str:
        """The text."""
        first, failure = self.get_first_failure()
        others = [(rank, it) for rank, it in sorted(self.failures.items()) if rank != first]
        parts = [f"{self.name} FAILED", "First failure:", _entry(first, failure)]
        if failure.stderr and failure.error_file == _NOT_AVAILABLE:
            parts += ["  stderr    : its last lines", *(f"    {line}" for line in failure.stderr)]
        if others:
            parts += ["Other failures:", *(_entry(rank, it) for rank, it in others)]
        return "\n".join(parts)


def _entry(rank: int, failure: ProcessFailure) -> str:
    code = f"{failure.exitcode}"
    if failure.exitcode < 0:
        code += f" ({failure.signal_name()})"
    lines = {
        "time": failure.timestamp_isoformat(),
        "host": failure.host,
        "rank": f"{rank} (local_rank: {failure.local_rank})",
        "exitcode": f"{code} (pid: {failure.pid})",
        "error_file": failure.error_file,
        "traceback": failure.text().rstrip().replace("\n", "\n    "),
    }
    return "\n".join(f"  {name:<10}: {value}" for name, value in lines.items())
