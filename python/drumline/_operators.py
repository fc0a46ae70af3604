"""The operators of reductions."""

from __future__ import annotations

from enum import Enum
from typing import Any


class ReduceOp(str, Enum):
    """The operators, under torch's names. Their own names in lower case serve as well: ``"sum"``."""

    SUM = "sum"
    AVG = "avg"
    PRODUCT = "product"
    MIN = "min"
    MAX = "max"
    BAND = "band"
    BOR = "bor"
    BXOR = "bxor"
    PREMUL_SUM = "premul_sum"
    """Needs a factor: pass ``("premul_sum", factor)``."""

    __str__ = str.__str__


reduce_op = ReduceOp
"""The name that old programs use."""

Op = Any
"""A `ReduceOp`, one of torch's, a name in any case, or ``("premul_sum", factor)``."""


def operator(op: Op) -> tuple[str, Any]:
    """The name of an operator in the core, which knows whether there is such a name, and the factor of
    ``premul_sum``."""
    if isinstance(op, str):
        return _lower(op), None
    if isinstance(op, tuple) and len(op) == 2 and isinstance(op[0], str):
        return _lower(op[0]), op[1]
    # torch's, which need not be imported here: a kind with a name, or an object around a kind.
    kind: Any = getattr(op, "op", op)
    if not (type(op).__module__.startswith("torch.") and isinstance(getattr(kind, "name", None), str)):
        raise ValueError(
            f'an operator is a name, a ReduceOp or ("premul_sum", factor), and this is {op!r:.80}'
        )
    name = kind.name.lower()
    if name != "premul_sum":
        return name, None
    if kind is op:
        raise ValueError('PREMUL_SUM needs a factor: pass ("premul_sum", factor)')
    torchs: Any = op
    factor = torchs.__getstate__()[1]
    return name, factor.item() if hasattr(factor, "item") else factor


def _lower(name: str) -> str:
    return name.value if isinstance(name, ReduceOp) else name.lower()
