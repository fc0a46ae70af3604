"""monitored_barrier through the store, so that a group can go on if ranks are missing."""

from __future__ import annotations

import time
from datetime import timedelta

import torch.distributed as dist

_PASSED = b"passed"


class MonitoredBarrier:
    """Barriers of one group, counted. Rank 0 looks who has come, and tells the others."""

    def __init__(self, store: dist.Store, rank: int, world_size: int) -> None:
        self._store, self._rank, self._world_size = store, rank, world_size
        self._count = 0

    def wait(self, timeout: timedelta, wait_all_ranks: bool) -> None:
        """Raises DistBackendError: on rank 0 it names who is missing, on others why rank 0 failed."""
        self._count += 1
        prefix = f"drumline/monitored_barrier/{self._count}"
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
            for rank in ranks:
                self._store.delete_key(f"{prefix}/{rank}")
            return
        named = missing if wait_all_ranks else missing[:1]
        who = f"Rank{'s' if len(named) > 1 else ''} {', '.join(map(str, named))}"
        text = f"[Rank 0]: {who} failed to pass monitoredBarrier in {_ms(timeout)} ms."
        if len(named) < len(missing):
            text += f" (All that are missing: {', '.join(map(str, missing))}.)"
        self._store.set(f"{prefix}/verdict", text.encode())
        raise dist.DistBackendError(text)

    def _has_come(self, key: str, deadline: float) -> bool:
        left = max(deadline - time.monotonic(), 0.001)
        try:
            self._store.wait([key], timedelta(seconds=left))
        except RuntimeError:
            return False
        return True

    def _report(self, prefix: str, timeout: timedelta) -> None:
        self._store.set(f"{prefix}/{self._rank}", b"here")
        try:
            self._store.wait([f"{prefix}/verdict"], max(timeout, timedelta(milliseconds=1)))
            verdict = self._store.get(f"{prefix}/verdict")
        except RuntimeError as error:
            verdict = str(error).encode()
        if verdict != _PASSED:
            raise dist.DistBackendError(
                f"[Rank {self._rank}]: Rank {self._rank} successfully reached monitoredBarrier, but "
                f"received errors while waiting for send/recv from rank 0. Please check rank 0 logs "
                f"for faulty rank. It says: {verdict.decode(errors='replace')}"
            )


def _ms(timeout: timedelta) -> int:
    return int(timeout.total_seconds() * 1000)
