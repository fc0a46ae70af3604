"""The group of the whole job."""

from __future__ import annotations

from drumline.groups import ProcessGroup

_world: ProcessGroup | None = None


def set_world(group: ProcessGroup) -> None:
    """Makes ``group`` the group of the whole job."""
    global _world
    _world = group


def is_world(group: ProcessGroup) -> bool:
    """Whether ``group`` is the group of the whole job."""
    return _world is group


def is_initialized() -> bool:
    """Whether there is a group of the whole job."""
    return _world is not None and not _world.is_destroyed


def group_or_world(group: ProcessGroup | None) -> ProcessGroup:
    """``group``, or without one the group of the whole job."""
    if isinstance(group, ProcessGroup):
        return group
    if group is not None:
        raise TypeError(
            f"a group is what drumline.init_process_group or drumline.new_group has made, and this is {group!r:.80}"
        )
    if _world is None:
        raise ValueError("there is no group yet: call init_process_group() first")
    if _world.is_destroyed:
        raise ValueError("the group has been destroyed: call init_process_group() for another one")
    return _world
