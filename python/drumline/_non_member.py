"""What `new_group` returns on ranks that are not in the group."""

from __future__ import annotations

import warnings
from typing import Any

from drumline import _core, _world
from drumline.groups import ProcessGroup

# They say who is in the group, and raise ValueError.
_NO_CALLS = ("alone", "new_group", "global_rank", "group_rank")

_CALLS = [
    name
    for kind in ProcessGroup.__mro__[:-1]
    for name, value in vars(kind).items()
    if callable(value) and not name.startswith("_") and name not in _NO_CALLS
]


class _NonMember(ProcessGroup):
    """A group that this rank is not in. Its calls do nothing and warn."""

    def __init__(self) -> None:
        pass

    @property
    def rank(self) -> int:
        return -1

    @property
    def world_size(self) -> int:
        return -1

    @property
    def is_destroyed(self) -> bool:
        return False

    @property
    def _group(self) -> _core.Group:  # type: ignore[override]
        raise ValueError("this rank is not in the group")

    def __repr__(self) -> str:
        return "GroupMember.NON_GROUP_MEMBER"


def _does_nothing(name: str) -> Any:
    def method(self: _NonMember, *_arguments: Any, **_settings: Any) -> None:
        if name not in ("abort", "destroy"):
            warnings.warn(f"{name} does nothing: this rank is not in the group", stacklevel=3)

    method.__name__ = name
    return method


for _name in _CALLS:
    setattr(_NonMember, _name, _does_nothing(_name))


class _OfJob(type):
    @property
    def WORLD(cls) -> ProcessGroup | None:  # noqa: N802 (torch's name)
        """The group of the whole job; None before `init_process_group`, and after its end."""
        return _world.group_or_world(None) if _world.is_initialized() else None


class GroupMember(metaclass=_OfJob):
    """``WORLD`` is the group of the whole job. ``NON_GROUP_MEMBER`` is what `new_group` returns on ranks that are not in
    the group."""

    NON_GROUP_MEMBER: ProcessGroup = _NonMember()


group = GroupMember
"""The name that most programs use: ``group.WORLD``."""
