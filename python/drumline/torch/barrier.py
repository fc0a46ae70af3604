"""monitored_barrier through the store: the group stays usable if ranks are missing."""

from __future__ import annotations

import time
from datetime import timedelta

import torch.distributed as dist

from drumline._core import Group
from drumline.torch.calls import LONGEST

_PASSED = "passed"

# Seconds that rank 0 has for its verdict once all ranks have come.
_VERDICT_S = 5.0


# How often a rank that waits looks whether others have gone.
_LOOK_EVERY_S = 0.25

# The longest pause between two questions to the store.
_PAUSE_MAX_S = 0.05


class _RankGone(Exception):
    """A rank will never come, and this says why."""


class MonitoredBarrier:
    """The barriers of one group, numbered. Rank 0 waits for all ranks and writes the verdict."""

    def __init__(self, store: dist.Store, group: Group) -> None:
        self._store, self._group = store, group
        self._rank, self._world_size = group.rank, group.world_size
        self._count = 0

    def wait(self, timeout: timedelta, wait_all_ranks: bool) -> None:
        """Raises DistBackendError, which names the missing ranks on every rank."""
        timeout = min(timeout, LONGEST)
        self._count += 1
        prefix = _prefix(self._count)
        if self._rank == 0:
            self._collect(prefix, timeout, wait_all_ranks)
        else:
            self._report(prefix, timeout, wait_all_ranks)

    def _collect(self, prefix: str, timeout: timedelta, wait_all_ranks: bool) -> None:
        if timeout <= timedelta(0):
            raise dist.DistBackendError(
                f"[Rank 0]: Rank 0 timed out in monitoredBarrier after {_ms(timeout)} ms."
            )
        deadline = time.monotonic() + timeout.total_seconds()
        self._store.set(f"{prefix}/0", "here")
        ranks = range(1, self._world_size)
        try:
            missing = [rank for rank in ranks if not self._has_come(f"{prefix}/{rank}", deadline, rank)]
        except _RankGone as gone:
            text = f"[Rank 0]: monitoredBarrier fails: {gone}"
            self._store.set(f"{prefix}/verdict", text)
            raise dist.DistBackendError(text) from None
        if not missing:
            self._store.set(f"{prefix}/verdict", _PASSED)
            # A rank that has come here has read the verdict of the barrier before.
            done = [f"{_prefix(self._count - 1)}/verdict"]
            done += [f"{prefix}/{rank}" for rank in range(self._world_size)]
            for key in done:
                self._store.delete_key(key)
            return
        text = f"[Rank 0]: {_failed_to_pass(missing, wait_all_ranks, timeout)}"
        self._store.set(f"{prefix}/verdict", text)
        raise dist.DistBackendError(text)

    def _has_come(self, key: str, deadline: float, rank: int) -> bool:
        """Waits until ``rank`` has written ``key``. It asks again and again: torch's client of a store logs each wait
        in vain."""
        pause, looked = 0.001, time.monotonic()
        while not self._is_there(key, deadline):
            now = time.monotonic()
            if now >= deadline:
                return False
            if now >= looked + _LOOK_EVERY_S:
                gone, looked = self._group.gone(rank), now
                if gone is not None and not self._is_there(key, now):  # it may have come before
                    raise _RankGone(gone)
            time.sleep(min(pause, deadline - now))
            pause = min(2 * pause, _PAUSE_MAX_S)
        return True

    def _is_there(self, key: str, deadline: float) -> bool:
        try:
            return self._store.check([key])
        except (RuntimeError, NotImplementedError):
            pass  # not every store can
        try:
            self._store.wait([key], timedelta(seconds=max(deadline - time.monotonic(), 0.001)))
        except RuntimeError:
            return False
        return True

    def _report(self, prefix: str, timeout: timedelta, wait_all_ranks: bool) -> None:
        self._store.set(f"{prefix}/{self._rank}", "here")
        deadline = time.monotonic() + timeout.total_seconds()
        try:
            if not self._has_come(f"{prefix}/verdict", deadline, 0):
                self._look(prefix, timeout, wait_all_ranks)
        except _RankGone as gone:
            raise self._failed(gone) from None
        verdict = self._store.get(f"{prefix}/verdict").decode(errors="replace")
        if verdict != _PASSED:
            raise self._failed(verdict)

    def _look(self, prefix: str, timeout: timedelta, wait_all_ranks: bool) -> None:
        """The time is over without a verdict: this rank looks who is missing. Returns if there is a
        verdict by now."""
        others = [rank for rank in range(self._world_size) if rank != self._rank]
        now = time.monotonic()
        missing = [rank for rank in others if not self._has_come(f"{prefix}/{rank}", now, rank)]
        # If all have come, rank 0 knows it at any moment.
        until = now if missing else now + _VERDICT_S
        if self._has_come(f"{prefix}/verdict", until, 0):
            return
        if not missing:
            raise self._failed("all ranks have come, and rank 0 does not say so")
        raise self._failed(_failed_to_pass(missing, wait_all_ranks, timeout))

    def _failed(self, why: object) -> Exception:
        return dist.DistBackendError(
            f"[Rank {self._rank}]: Rank {self._rank} successfully reached monitoredBarrier, but "
            f"received errors while waiting for send/recv from rank 0. Please check rank 0 logs "
            f"for faulty rank. It says: {why}"
        )


def _prefix(count: int) -> str:
    return f"drumline/monitored_barrier/{count}"


def _failed_to_pass(missing: list[int], wait_all_ranks: bool, timeout: timedelta) -> str:
    """What gloo says of missing ranks, and all of them."""
    named = missing if wait_all_ranks else missing[:1]
    who = f"Rank{'s' if len(named) > 1 else ''} {', '.join(map(str, named))}"
    text = f"{who} failed to pass monitoredBarrier in {_ms(timeout)} ms."
    if len(named) < len(missing):
        text += f" (All that are missing: {', '.join(map(str, missing))}.)"
    return text


def _ms(timeout: timedelta) -> int:
    return int(timeout.total_seconds() * 1000)
