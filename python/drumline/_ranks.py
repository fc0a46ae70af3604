"""The two numbers of a rank: in its group, and in the whole job."""

from __future__ import annotations

import operator
from functools import cached_property

from drumline import _core


class Ranks:
    """The members of a group."""

    _group: _core.Group

    @property
    def ranks(self) -> list[int]:
        """The members' numbers in the whole job."""
        return list(self._numbers)

    def group_rank(self, global_rank: int) -> int:
        """The number in the group of the job's rank ``global_rank``. ValueError if that is no member."""
        number = self._numbers.get(operator.index(global_rank))
        if number is None:
            raise ValueError(f"Global rank {global_rank} is not part of group {self._group.name!r}")
        return number

    def global_rank(self, group_rank: int) -> int:
        """The number in the whole job of the group's rank ``group_rank``. ValueError if there is none."""
        return self.ranks[self._checked(group_rank)]

    @cached_property
    def _numbers(self) -> dict[int, int]:
        """The members' numbers in the group, by those in the whole job."""
        return {rank: number for number, rank in enumerate(self._group.ranks)}

    def _checked(self, group_rank: int) -> int:
        """The number of a rank of the group, whatever kind of integer it is."""
        number, count = operator.index(group_rank), len(self._numbers)
        if not 0 <= number < count:
            raise ValueError(
                f"Group rank {group_rank} is not part of group {self._group.name!r}, which has the ranks 0 to "
                f"{count - 1}"
            )
        return number

    def _who(self, rank: int) -> str:
        """``rank 1 (global rank 3)``, or ``rank 1`` where both numbers are the same."""
        number = self.ranks[rank] if 0 <= rank < len(self._numbers) else rank
        return f"rank {rank}" if number == rank else f"rank {rank} (global rank {number})"
