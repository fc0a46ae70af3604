"""monitored_barrier through the store: the group stays usable if ranks are missing."""

from __future__ import annotations

import time
from datetime import timedelta

import torch.distributed as dist

from drumline.torch.calls import LONGEST

_PASSED = "passed"


class MonitoredBarrier:
    """The barriers of one group, numbered. Rank 0 waits for all ranks and writes the verdict."""

    def __init__(self, store: dist.Store, rank: int, world_size: int) -> None:
        self._store, self._rank, self._world_size = store, rank, world_size
        self._count = 0

    def wait(self, timeout: timedelta, wait_all_ranks: bool) -> None:
        """Raises DistBackendError: on rank 0 it names missing ranks, on others the failure of rank 0."""
        timeout = min(timeout, LONGEST)
        self._count += 1
        prefix = _prefix(self._count)
        if self._rank == 0:
            self._collect(prefix, timeout, wait_all_ranks)
        else:
            self._report(prefix, timeout)

    def _collect(self, prefix: str, timeout: timedelta, wait_all_ranks: bool) -> None:
        if timeout <= timedelta(0):
            raise dist.DistBackendError(
                f"[Rank 0]: Rank 0 timed out in monitoredBarrier after {_ms(timeout)} ms."
            )
        deadline = time.monotonic() + timeout.total_seconds()
        ranks = range(1, self._world_size)
        missing = [rank for rank in ranks if not self._has_come(f"{prefix}/{rank}", deadline)]
        if not missing:
            self._store.set(f"{prefix}/verdict", _PASSED)
            # A rank that has come here has read the verdict of the barrier before.
            done = [f"{_prefix(self._count - 1)}/verdict", *(f"{prefix}/{rank}" for rank in ranks)]
            for key in done:
                self._store.delete_key(key)
            return
        named = missing if wait_all_ranks else missing[:1]
        who = f"Rank{'s' if len(named) > 1 else ''} {', '.join(map(str, named))}"
        text = f"[Rank 0]: {who} failed to pass monitoredBarrier in {_ms(timeout)} ms."
        if len(named) < len(missing):
            text += f" (All that are missing: {', '.join(map(str, missing))}.)"
        self._store.set(f"{prefix}/verdict", text)
        raise dist.DistBackendError(text)

    def _has_come(self, key: str, deadline: float) -> bool:
        left = max(deadline - time.monotonic(), 0.001)
        try:
            self._store.wait([key], timedelta(seconds=left))
        except RuntimeError:
            return False
        return True

    def _report(self, prefix: str, timeout: timedelta) -> None:
        self._store.set(f"{prefix}/{self._rank}", "here")
        try:
            self._store.wait([f"{prefix}/verdict"], max(timeout, timedelta(milliseconds=1)))
            verdict = self._store.get(f"{prefix}/verdict").decode(errors="replace")
        except RuntimeError as error:
            raise self._failed(error) from None
        if verdict != _PASSED:
            raise self._failed(verdict)

    def _failed(self, why: object) -> Exception:
        return dist.DistBackendError(
            f"[Rank {self._rank}]: Rank {self._rank} successfully reached monitoredBarrier, but "
            f"received errors while waiting for send/recv from rank 0. Please check rank 0 logs "
            f"for faulty rank. It says: {why}"
        )


def _prefix(count: int) -> str:
    return f"drumline/monitored_barrier/{count}"


def _ms(timeout: timedelta) -> int:
    return int(timeout.total_seconds() * 1000)
