"""What ranks write to files, and what is shown."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntFlag
from typing import Any


class Std(IntFlag):
    """Streams of a rank."""

    NONE = 0
    OUT = 1
    ERR = 2
    ALL = OUT | ERR

    @classmethod
    def from_str(cls, text: str) -> Std | dict[int, Std]:
        """``"3"``, for all ranks, or ``"0:3,1:1"``, by local rank."""
        if ":" not in text:
            return cls(int(text))
        pairs = (entry.split(":") for entry in text.split(","))
        return {int(rank): cls(int(streams)) for rank, streams in pairs}


class LogsSpecs:
    """Where logs go, as torch's ``DefaultLogsSpecs`` says it. torch's own objects are taken, too.

    ``redirects`` are streams that go to files and are not shown, ``tee`` those that go to files and are shown. Either
    is for all ranks, or by local rank. ``local_ranks_filter`` has the local ranks whose output is shown.
    """

    def __init__(
        self,
        log_dir: str | None = None,
        redirects: Std | Mapping[int, Std] = Std.NONE,
        tee: Std | Mapping[int, Std] = Std.NONE,
        local_ranks_filter: set[int] | None = None,
    ) -> None:
        self._root_log_dir = log_dir
        self._redirects = redirects
        self._tee = tee
        self._local_ranks_filter = local_ranks_filter

    @property
    def root_log_dir(self) -> str | None:
        """The directory."""
        return self._root_log_dir


DefaultLogsSpecs = LogsSpecs


def flags(specs: Any) -> list[str]:
    """The options of ``drumline run`` that say the same."""
    given: list[str] = []
    directory = getattr(specs, "_root_log_dir", None)
    if directory:
        given.append(f"--log-dir={directory}")
    for name in ("redirects", "tee"):
        if streams := _streams(getattr(specs, f"_{name}", 0)):
            given.append(f"--{name}={streams}")
    if ranks := getattr(specs, "_local_ranks_filter", None):
        given.append("--local-ranks-filter=" + ",".join(str(rank) for rank in sorted(ranks)))
    return given


def _streams(streams: Any) -> str:
    if isinstance(streams, Mapping):
        return ",".join(f"{rank}:{int(which)}" for rank, which in sorted(streams.items()))
    return str(int(streams)) if streams else ""
