"""Callbacks of autograd, for gradients and for the end of backward, and averages as a part of its graph."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch


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


def calling(owner: object, method: str, *args: object) -> Callable[..., Any]:
    """A hook that calls a method of ``owner``, and does not keep ``owner`` alive."""
    reference = weakref.ref(owner)

    def hook(*more: object) -> Any:
        living = reference()
        return None if living is None else getattr(living, method)(*args, *more)

    return hook


class Averaged(torch.autograd.Function):
    """The average in the place of a rank's own gradient, for a backward with ``create_graph``.

    The average over ``n`` ranks has the derivative ``1/n`` by each rank's own value. The gradient of the parameter that
    it leads to is averaged in its turn. So a derivative passes here as it comes.
    """

    @staticmethod
    def of(own: Any, average: Any) -> Any:
        """The average, with the derivatives of ``own``."""
        with torch.enable_grad():
            return Averaged.apply(own, average)

    @staticmethod
    def forward(ctx: Any, own: Any, average: Any) -> Any:  # noqa: D102
        return torch.empty_like(own).copy_(average)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:  # noqa: D102
        return gradients[0], None


def untraced(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method that torch.compile leaves as it is: it calls the other ranks."""
    # Called only by a compiler, since its first call loads one.
    left_out = torch._disable_dynamo(method)

    @functools.wraps(method)
    def call(*args: Any) -> Any:
        return left_out(*args) if torch.compiler.is_compiling() else method(*args)

    return call
