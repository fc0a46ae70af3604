"""A group that goes on without ranks that have died."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar

from drumline import _core, _exit, _world
from drumline.groups import ProcessGroup

_Result = TypeVar("_Result")


class ElasticGroup:
    """A group that goes on without ranks that have died.

    A program hands in what its ranks do together, piece by piece: a step, an evaluation, a checkpoint. All ranks run the
    same pieces in the same order. If a rank dies, the others form a smaller group, and run the piece that was under way
    again, on all of them. So no piece is lost, and none is done twice::

        elastic = drumline.ElasticGroup()
        for step in range(steps):
            elastic.run(lambda group: train(step, group))
        elastic.close()

    The place where the ranks have met must outlive them: the store of `drumline run`, a file or etcd. At least ``min_ranks``
    ranks must be left (a setting of `init_process_group`): unless set, half of them.

    ``group`` is that of the whole job, which it is without an argument, too. A group of some ranks does not go on.

    It may be the default group of ``torch.distributed``, of any backend (``DRUMLINE_MIN_RANKS`` sets ``min_ranks``). Pieces get a group of drumline's with the same ranks.
    torch's own group, its rank and its size stay as they were, and once a rank has died, calls on it fail.
    """

    def __init__(self, group: Any = None) -> None:
        of_torch = _of_torch(group)
        self._group = of_torch or _world.group_or_world(group)
        # torch holds it until it destroys its own.
        self._of_torch = None if of_torch is None else of_torch._group
        self._elastic = _core.ElasticGroup(self._group._group)
        _exit.watch(self._elastic)

    @property
    def group(self) -> ProcessGroup:
        """The group of the ranks that are there. The group of before has failed if a rank has died. If it was the group of
        the whole job, this one takes its place in `drumline.all_reduce` and the other functions."""
        return self._object(self._elastic.group)

    def run(self, piece: Callable[[ProcessGroup], _Result]) -> _Result:
        """Calls ``piece(group)``, which makes its collectives on that group, and returns what it returns. It may be called
        several times, each time with another group. What it changes outside, it must set right at its begin.

        Raises what ``piece`` raises, if no rank has died. ConnectError if too few ranks are left, or the others have gone on
        without this one.
        """
        result: _Result = self._elastic.run(lambda group: piece(self._object(group)))
        _ = self.group
        return result

    def close(self) -> None:
        """Closes the group after all ranks that are left have called this."""
        _ = self.group
        self._elastic.close()
        if self._of_torch is not None and not self._of_torch.is_destroyed:
            self._of_torch.drop()

    def _object(self, group: _core.Group) -> ProcessGroup:
        if group is not self._group._group:
            before, self._group = self._group, ProcessGroup(group)
            if _world.is_world(before):
                _world.set_world(self._group)
        return self._group

    def __repr__(self) -> str:
        return f"<ElasticGroup of {self._group!r}>"


def _of_torch(group: Any) -> ProcessGroup | None:
    """drumline's group with the ranks of a default group of torch's; None for any other one."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return None
    world = dist.group.WORLD
    if group is not world and (group is not None or _world.is_initialized()):
        return None
    from drumline.ddp.groups import core_group

    return ProcessGroup(core_group(world))
