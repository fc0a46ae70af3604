"""Tensors in what a forward returns, and the graph behind them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType, ModuleType
from typing import Any

import torch

# What has no outputs inside, or too much else.
_CLOSED = (str, bytes, int, float, type, FunctionType, ModuleType, torch.nn.Module)
_OBJECTS_MAX = 1000


def tensors_in(value: Any) -> Iterator[Any]:
    """All tensors in nested containers, and in the attributes of objects of any class."""
    # `seen` keeps the objects alive: a new one must not get the `id` of a dropped one.
    seen: dict[int, Any] = {}
    waiting, objects = [value], 0
    while waiting:
        value = waiting.pop()
        if value is None or isinstance(value, _CLOSED) or id(value) in seen:
            continue
        seen[id(value)] = value
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, Mapping):
            waiting.extend(value.values())
        elif isinstance(value, list | tuple | set | frozenset | deque):
            waiting.extend(value)
        elif objects < _OBJECTS_MAX:
            objects += 1
            waiting.extend(_attributes(value))


def _attributes(value: Any) -> list[Any]:
    slots = [slot for kind in type(value).__mro__ for slot in _slots(kind)]
    return [*getattr(value, "__dict__", {}).values(), *(getattr(value, it, None) for it in slots)]


def _slots(kind: type) -> list[str]:
    slots = kind.__dict__.get("__slots__", ())
    names = [slots] if isinstance(slots, str) else list(slots)
    return [it for it in names if it not in ("__dict__", "__weakref__")]


def functions_of(outputs: Any) -> list[Any]:
    """The functions that computed the tensors, each once."""
    functions = (tensor.grad_fn for tensor in tensors_in(outputs))
    return list(dict.fromkeys(function for function in functions if function is not None))


def parameters_reached(outputs: Any) -> set[int]:
    """The leaves that a backward from ``outputs`` leads to, by ``id``."""
    reached = {id(tensor) for tensor in tensors_in(outputs) if tensor.is_leaf}
    # `seen` keeps the functions alive: a new one must not get the `id` of a dropped one.
    seen = set(functions_of(outputs))
    waiting = list(seen)
    while waiting:
        function = waiting.pop()
        variable = getattr(function, "variable", None)
        if variable is not None:
            reached.add(id(variable))
        for following, _ in function.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
    return reached


def mapped(value: Any, function: Callable[[Any], Any]) -> Any:
    """Nested inputs with ``function`` of all their tensors."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, tuple):
        items = [mapped(item, function) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, list):
        return [mapped(item, function) for item in value]
    if isinstance(value, dict):
        return type(value)((key, mapped(item, function)) for key, item in value.items())
    return value


def moved(value: Any, device: Any) -> Any:
    """Nested inputs with all tensors on ``device``."""
    return mapped(value, lambda tensor: tensor.to(device, non_blocking=True))
