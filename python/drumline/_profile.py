"""Calls of the direct API as events of torch's profiler, where a program uses that."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar

Method = TypeVar("Method", bound=Callable[..., Any])


def profiled(title: str) -> Callable[[Method], Method]:
    """Has a method leave an event ``drumline:title``, with the shapes of its first argument, as the same
    call on the backend of torch does."""

    def around(method: Method) -> Method:
        @functools.wraps(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            torch = sys.modules.get("torch")
            if torch is None or not torch.autograd._profiler_enabled():
                return method(self, *args, **kwargs)
            from drumline.torch import profile

            given = args[:1] or list(kwargs.values())[:1]
            event = profile.begin(title, _tensors(torch, given))
            work = None
            try:
                work = method(self, *args, **kwargs)
                return work
            finally:
                handle = getattr(work, "_handle", None)
                profile.end(event, [] if handle is None else [handle])

        return call  # type: ignore[return-value]

    return around


def _tensors(torch: Any, given: Any) -> list[Any]:
    """The arrays in these arguments, as torch shows their shapes."""
    found = []
    for it in given:
        if isinstance(it, list | tuple):
            found += _tensors(torch, it)
        elif isinstance(it, torch.Tensor):
            found.append(it)
        elif hasattr(it, "shape") and hasattr(it, "dtype"):
            found.append(torch.empty(tuple(it.shape), device="meta"))
    return found
