"""Ranks with different numbers of batches."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.distributed.algorithms.join import JoinHook

from drumline import _core
from drumline.ddp.reducer import Reducer
from drumline.torch.tensors import CODE

# Each rank sends one of these before each forward.
_ENDED, _SYNCS, _ACCUMULATES = 0, 1, 2


class Joined(JoinHook):
    """Before each forward, every rank sends whether it has data. Ranks without data make the same calls as
    the others.

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
        self.first_active = 0
        """The rank whose buffers all ranks take."""

    def begin_forward(self, syncs: bool) -> None:
        """This rank has data."""
        self._ask(_SYNCS if syncs else _ACCUMULATES)

    def main_hook(self) -> None:
        """This rank has ended, and others have not: does what they do in one step. torch's `Join` calls
        it, which has asked before whether there are any."""
        self._shadow(self._ask(_ENDED))

    def post_hook(self, is_last_joiner: bool) -> None:
        """All have ended."""
        self._reducer.scale = None
        self._end(max(self._gather(self._group.rank if is_last_joiner else -1)))

    def shadow(self) -> None:
        """`main_hook` until all ranks have ended, and `post_hook`, without torch's `Join`."""
        is_last_joiner = True
        while any(said := self._ask(_ENDED)):
            is_last_joiner = False
            self._shadow(said)
        self.post_hook(is_last_joiner)

    def _shadow(self, said: list[int]) -> None:
        self._sync_buffers()
        if _SYNCS in said:
            self._reducer.shadow()

    def _ask(self, own: int) -> list[int]:
        said = self._gather(own)
        active = [rank for rank, what in enumerate(said) if what != _ENDED]
        if active and len(active) < len(said) and self._throw:
            ended = [rank for rank, what in enumerate(said) if what == _ENDED]
            raise RuntimeError(f"ranks {ended} have no data left, and others have (join)")
        self.first_active = active[0] if active else 0
        is_partial = bool(active) and not self._divide_by_initial
        self._reducer.scale = len(said) / len(active) if is_partial else None
        return said

    def _gather(self, own: int) -> list[int]:
        all_ranks = torch.empty(self._group.world_size, dtype=torch.int64)
        one = torch.tensor([own])
        code = CODE[torch.int64]
        self._group.all_gather(
            (one.data_ptr(), 1, code, one),
            [(all_ranks.data_ptr(), all_ranks.numel(), code, all_ranks)],
        )
        gathered: list[int] = all_ranks.tolist()
        return gathered
