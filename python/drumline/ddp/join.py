"""Ranks with different numbers of batches."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from enum import IntFlag
from typing import Any

import torch
from torch.distributed.algorithms.join import JoinHook

from drumline import _core
from drumline.ddp.reducer import Reducer
from drumline.torch.tensors import CODE


class Has(IntFlag):
    """What a rank tells the others before each forward. A rank whose data has ended: only what is left."""

    DATA = 1
    REST = 2
    """Gradients that were added up and not averaged yet."""
    GRADIENTS = 4
    """The backward of this forward is averaged."""
    BUFFERS = 8
    """This forward takes the buffers of one rank."""
    STATISTICS = 16
    """This forward normalises over all ranks."""


# How much of a number the flags, or a rank, take.
_BITS = 32

# How often the ranks of a group have joined: the same number on all of them.
_joined: weakref.WeakKeyDictionary[_core.Group, int] = weakref.WeakKeyDictionary()


class Joined(JoinHook):
    """Before each forward, every rank sends what it `Has`. Ranks without data make the same calls as the others.

    A forward calls ``sync_buffers`` first. When all ranks have ended, ``end`` is called with the number of
    a rank that had data longest.
    """

    def __init__(
        self,
        group: _core.Group,
        reducer: Reducer,
        sync_buffers: Callable[[], None],
        end: Callable[[int], None],
        divide_by_initial: bool = True,
        throw: bool = False,
    ) -> None:
        self._group, self._reducer = group, reducer
        self._sync_buffers, self._end = sync_buffers, end
        self._divide_by_initial, self._throw = divide_by_initial, throw
        self._number = _joined[group] = _joined.get(group, 0) + 1
        self._gradients: list[Any] | None = None
        self.last_active = 0
        """The rank whose buffers all ranks take: the last one that has data."""

    def begin_forward(self, has: Has) -> None:
        """This rank has data."""
        self._ask(has | Has.DATA)

    def main_hook(self) -> None:
        """This rank has ended, and others have not: does what they do in one step. torch's `Join` calls
        it, which has asked before whether there are any."""
        self._shadow(self._ask_ended())

    def post_hook(self, is_last_joiner: bool) -> None:
        """All have ended."""
        self._reducer.scale = None
        if self._gradients is not None:
            for parameter, gradient in zip(self._reducer.parameters, self._gradients, strict=True):
                parameter.grad = gradient
        ranks = self._gather(self._group.rank + 1 if is_last_joiner else 0, is_end=True)
        self._end(max(ranks) - 1)

    def shadow(self) -> None:
        """`main_hook` until all ranks have ended, and `post_hook`, without torch's `Join`."""
        is_last_joiner = True
        while (said := self._ask_ended()) & Has.DATA:
            is_last_joiner = False
            self._shadow(said)
        self.post_hook(is_last_joiner)

    def _shadow(self, said: Has) -> None:
        if said & Has.BUFFERS:
            self._sync_buffers()
        if said & Has.GRADIENTS:
            if self._gradients is None:
                # Averages are for optimizers of this join, and not to be added to when the rank has data again.
                self._gradients = self._reducer.averaged()
            self._reducer.shadow()

    def _ask_ended(self) -> Has:
        return self._ask(Has.REST if self._reducer.has_rest else Has(0))

    def _ask(self, own: Has) -> Has:
        """What the ranks with data have, which is the same for all of them."""
        said = [Has(it) for it in self._gather(own)]
        active = [rank for rank, has in enumerate(said) if has & Has.DATA]
        self._check(said, active)
        self.last_active = active[-1] if active else 0
        # A rank that ended between two averages still adds to the next one.
        adding = sum(1 for has in said if has & (Has.DATA | Has.REST))
        is_partial = bool(active) and not self._divide_by_initial
        self._reducer.scale = len(said) / adding if is_partial else None
        return said[active[0]] & ~Has.REST if active else Has(0)

    def _check(self, said: list[Has], active: list[int]) -> None:
        """Raises on all ranks alike."""
        ended = [rank for rank in range(len(said)) if rank not in active]
        if active and ended and self._throw:
            raise RuntimeError(f"ranks {ended} have no data left, and others have (join)")
        if active and ended and any(said[rank] & Has.STATISTICS for rank in active):
            raise RuntimeError(
                f"ranks {ended} have no data left, and others have (join). The model has SyncBatchNorm, which "
                "needs the batches of all ranks: give all the same number of batches, or catch this error with "
                "throw_on_early_termination=True"
            )
        for what, text in _TOLD.items():
            those = [rank for rank in active if said[rank] & what]
            if those and len(those) < len(active):
                others = [rank for rank in active if rank not in those]
                raise RuntimeError(f"join: in this forward, ranks {those} {text}, and ranks {others} do not")

    def _gather(self, own: int, is_end: bool = False) -> list[int]:
        # Ranks that wait in the joins of two models must not take each other's numbers.
        call = (self._number << 1 | is_end) << _BITS
        said = _gathered(self._group, call | own)
        if any((it ^ call) >> _BITS for it in said):
            raise RuntimeError(
                "join: the ranks are in forwards, or at the end, of different models. Call the models in one order "
                "on all ranks, equally often, and join several at once: "
                "torch.distributed.algorithms.Join([first, second])"
            )
        return [it ^ call for it in said]


_TOLD = {
    Has.GRADIENTS: "have a backward that is averaged (others: no_sync)",
    Has.BUFFERS: "take the buffers of another rank",
    Has.STATISTICS: "normalise over all ranks (SyncBatchNorm)",
}


def _gathered(group: _core.Group, own: int) -> list[int]:
    all_ranks = torch.empty(group.world_size, dtype=torch.int64)
    one = torch.tensor([own])
    code = CODE[torch.int64]
    group.all_gather(
        (one.data_ptr(), 1, code, one),
        [(all_ranks.data_ptr(), all_ranks.numel(), code, all_ranks)],
    )
    gathered: list[int] = all_ranks.tolist()
    return gathered


class Joining:
    """The context of `join`. It may be entered again."""

    def __init__(self, begin: Callable[[], Joined], leave: Callable[[], None]) -> None:
        self._begin, self._leave = begin, leave
        self._joined: Joined | None = None

    def __enter__(self) -> None:
        self._joined = self._begin()

    def __exit__(self, kind: Any, *_: Any) -> None:
        try:
            if kind is None and self._joined is not None:
                self._joined.shadow()
        finally:
            self._joined = None
            self._leave()
