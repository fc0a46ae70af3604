"""What ranks failed of."""

from __future__ import annotations

import json
import signal
import time
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from drumline import _core

NOT_AVAILABLE = "<N/A>"
"""What torch writes where there is nothing."""

# The longest error file that is read, as by the launcher.
_BYTES_MAX = 1024 * 1024

_HOW_TO_SEE_MORE = "it wrote no error file: decorate its main function with drumline.launch.record to see its traceback"


@dataclass
class ProcessFailure:
    """How a rank failed. Fields, and what they mean, are torch's."""

    local_rank: int
    pid: int
    exitcode: int
    """-n if signal n has killed it."""
    error_file: str
    """``<N/A>`` if there is none, or if it has been removed."""
    error_file_data: dict[str, Any] | None = None
    """What the error file has. It is read unless this is given."""
    ended_at: float | None = None
    """When the process ended, in seconds since 1970."""
    stderr: list[str] = field(default_factory=list)
    """The last lines of its stderr, if it was the first one."""
    message: Any = field(init=False, default="")
    """What happened: a text, or ``{"message": ..., "extraInfo": {"py_callstack": ...}}``."""
    timestamp: int = field(init=False)
    """When it happened, in whole seconds since 1970."""

    def __post_init__(self) -> None:
        self.timestamp = int(time.time() if self.ended_at is None else self.ended_at)
        if self.error_file_data is None:
            self._read()
        try:
            data = {} if self.error_file_data is None else self.error_file_data
            self.message = data.get("message") or ""
            extra = data if isinstance(self.message, str) else self.message["extraInfo"]
            self.timestamp = int(extra.get("timestamp") or self.timestamp)
        except (ValueError, TypeError, KeyError, AttributeError):
            self.message = f"the error file is damaged: {json.dumps(self.error_file_data)[:1000]}"
        if not self.message:
            signalled = f"Signal {-self.exitcode} ({self.signal_name()}) received by PID {self.pid}"
            self.message = signalled if self.exitcode < 0 else _HOW_TO_SEE_MORE

    def _read(self) -> None:
        """A damaged file is quoted."""
        try:
            text = _core.read_file(self.error_file, _BYTES_MAX).decode(errors="replace")
        except OSError:
            self.error_file = NOT_AVAILABLE
            return
        try:
            self.error_file_data = json.loads(text)
        except ValueError:
            self.error_file_data = {"message": f"the error file is damaged: {text[:1000]}"}

    def signal_name(self) -> str:
        """``SIGKILL``, for example; ``<N/A>`` if it was no signal."""
        try:
            return signal.Signals(-self.exitcode).name
        except ValueError:
            return NOT_AVAILABLE

    def timestamp_isoformat(self) -> str:
        """The time as ``2026-01-31_12:00:00``."""
        return datetime.fromtimestamp(self.timestamp).isoformat(sep="_")

    def text(self) -> str:
        """The traceback, or what is known in its place."""
        if not isinstance(self.message, dict):
            return str(self.message)
        extra = self.message.get("extraInfo") or {}
        return str(extra.get("py_callstack") or self.message.get("message") or NOT_AVAILABLE)


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
        if failure.stderr and not isinstance(failure.message, dict):
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
        "rank": f"{rank} (local_rank: {failure.local_rank})",
        "exitcode": f"{code} (pid: {failure.pid})",
        "error_file": "" if failure.error_file == NOT_AVAILABLE else failure.error_file,
        "traceback": failure.text().rstrip().replace("\n", "\n    "),
    }
    return "\n".join(f"  {name:<10}: {value}" for name, value in lines.items() if value)
