"""Ranks with different numbers of batches."""

from __future__ import annotations

from collections.abc import Callable

import torch

from drumline import _core
from drumline.ddp.reducer import Reducer
from drumline.torch.tensors import CODE

# What a rank says before each forward.
_ENDED, _SYNCS, _ACCUMULATES = 0, 1, 2


class Joined:
    """All ranks say before each forward whether they have data."""

    def __init__(
        self, group: _core.Group, reducer: Reducer, divide_by_initial: bool, throw: bool
    ) -> None:
        self._group, self._reducer = group, reducer
        self._divide_by_initial, self._throw = divide_by_initial, throw
        self.first_active = 0
        """Whose buffers all take."""

    def begin_forward(self, syncs: bool) -> None:
        """This rank has data."""
        self._ask(_SYNCS if syncs else _ACCUMULATES)

    def shadow(self, sync_buffers: Callable[[], None], take: Callable[[int], None]) -> None:
        """This rank has ended: does what the others do until they have, too. Then all take the
        parameters of one that went on longest."""
        last_active = self._group.rank
        while True:
            said = self._ask(_ENDED)
            if not any(said):
                break
            last_active = self.first_active
            sync_buffers()
            if _SYNCS in said:
                self._reducer.shadow()
        # Who ended last has seen nobody active, and so names itself.
        ends = self._gather(-1 if last_active != self._group.rank else last_active)
        take(max(ends))

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
