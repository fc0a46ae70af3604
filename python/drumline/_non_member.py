"""What `new_group` returns on ranks that are not in the group."""

from __future__ import annotations

import warnings
from typing import Any

from drumline import _core
from drumline.groups import ProcessGroup

_CALLS = [
    name
    for kind in ProcessGroup.__mro__[:-1]
    for name, value in vars(kind).items()
    if callable(value) and not name.startswith("_") and name not in ("alone", "new_group")
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


class GroupMember:
    """What `new_group` returns where there is no group."""

    NON_GROUP_MEMBER: ProcessGroup = _NonMember()
