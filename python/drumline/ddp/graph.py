"""Tensors in what a forward returns, and the graph behind them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch


def tensors_in(value: Any) -> Iterator[Any]:
    """All tensors in nested lists, tuples, dicts and dataclasses."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name, None))


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
