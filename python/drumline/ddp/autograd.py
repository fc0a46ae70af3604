"""Callbacks of autograd, for gradients and for the end of backward."""

from __future__ import annotations

import weakref
from collections.abc import Callable


class End:
    """A callback for the end of backward. If backward raises, autograd drops the callback uncalled."""

    def __init__(self, on_end: Callable[[], None], on_failure: Callable[[], None]) -> None:
        self._on_end: Callable[[], None] | None = on_end
        self._on_failure = on_failure

    def __call__(self) -> None:
        on_end, self._on_end = self._on_end, None
        if on_end is not None:
            on_end()

    def __del__(self) -> None:
        if self._on_end is not None:
            self._on_failure()


def calling(owner: object, method: str, *args: object) -> Callable[..., None]:
    """A hook that calls a method of ``owner``, and does not keep ``owner`` alive."""
    reference = weakref.ref(owner)

    def hook(*more: object) -> None:
        living = reference()
        if living is not None:
            getattr(living, method)(*args, *more)

    return hook
