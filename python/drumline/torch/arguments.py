"""Checks the arguments that torch passes to a backend, and translates them for the core."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from drumline.torch.tensors import width

T = TypeVar("T")

# By the hash, which is torch's number of an operator: to ask for the operator itself takes ten times as long.
_OPERATORS = {
    hash(getattr(dist.ReduceOp.RedOpType, name)): (name.lower(), None)
    for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
}


def only(things: Sequence[T], operation: str) -> T:
    """The tensor of a call that takes a list of one."""
    if len(things) != 1:
        raise ValueError(f"{operation} takes one tensor per rank, and got {len(things)}")
    return things[0]


def operator(opts: Any) -> tuple[str, Any]:
    """The reduce operator by its name, and the factor of ``premul_sum``."""
    op = opts.reduceOp
    found = _OPERATORS.get(hash(op))
    if found is not None:
        return found
    kind = getattr(op, "op", op)
    if getattr(kind, "name", "") != "PREMUL_SUM":
        raise ValueError(f"drumline has no reduce operator {kind}")
    factor = op.__getstate__()[1]
    return "premul_sum", factor.item() if isinstance(factor, torch.Tensor) else factor


def checked_tag(tag: int) -> int:
    """The tag of a message."""
    if tag < 0:
        raise ValueError("Tag must be nonnegative")
    return tag


def check_list(tensors: Sequence[Any], world_size: int, what: str) -> None:
    """A list with an entry for every rank."""
    if len(tensors) != world_size:
        raise ValueError(
            f"invalid {what} tensor list at index 0 (expected length {world_size}, got "
            f"{len(tensors)})"
        )


def list_at_root(
    lists: list[list[torch.Tensor]], is_root: bool, world_size: int, what: str
) -> list[torch.Tensor]:
    """The list of the root; other ranks pass none."""
    if not is_root:
        if lists and lists[0]:
            raise ValueError(f"requires an empty {what} list on ranks other than the root")
        return []
    tensors = lists[0] if len(lists) == 1 else []
    check_list(tensors, world_size, what)
    return tensors


def split_counts(tensor: torch.Tensor, sizes: list[int], world_size: int) -> list[int]:
    """Elements for each rank. ``sizes`` are rows for each rank; empty means equally many."""
    rows = tensor.size(0) if tensor.dim() else 1
    row = tensor.numel() // rows * width(tensor) if rows else 0
    if not sizes:
        if rows % world_size:
            raise ValueError("Tensor's dim 0 does not divide equally across group size")
        return [rows // world_size * row] * world_size
    if len(sizes) != world_size:
        raise ValueError("Number of tensor splits not equal to group size")
    if sum(sizes) != rows:
        raise ValueError("Split sizes doesn't match total dim 0 size")
    return [size * row for size in sizes]


def by_type(things: Sequence[T], type_of: Callable[[T], torch.dtype]) -> list[list[T]]:
    """The things in lists of one type each, in an order that is the same on all ranks."""
    kinds: dict[torch.dtype, list[T]] = {}
    for thing in things:
        kinds.setdefault(type_of(thing), []).append(thing)
    return list(kinds.values())
