"""What other processes can be given."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any


def is_importable(fn: Callable[..., Any]) -> bool:
    """Whether a fresh interpreter can import the program that ``fn`` is of. It can if the program is a file."""
    if getattr(fn, "__module__", None) != "__main__":
        return True
    main = sys.modules["__main__"]
    return bool(os.path.exists(getattr(main, "__file__", None) or "") or getattr(main, "__spec__", None))


def not_importable(fn: Callable[..., Any], instead: str) -> pickle.PicklingError:
    """The error that says so. ``instead`` says what else would work."""
    return pickle.PicklingError(
        f"other processes cannot import the function {name(fn)}, because this program is no file (python -c, stdin, a "
        f"notebook): define it in a module, or {instead}"
    )


def not_picklable(
    fn: Callable[..., Any], args: Sequence[Any], error: Exception, instead: str
) -> pickle.PicklingError:
    """The error that says what cannot be sent. ``instead`` says what else would work."""
    what = next(_culprits(fn, args), "the function or one of its arguments")
    return pickle.PicklingError(
        f"{what} cannot be sent to other processes: {error}. Define functions and classes at the top of a module, or "
        f"{instead}"
    )


def name(fn: Callable[..., Any]) -> str:
    """What to call the function."""
    return getattr(fn, "__qualname__", None) or repr(fn)


def _culprits(fn: Callable[..., Any], args: Sequence[Any]) -> Iterator[str]:
    named = [(f"the function {name(fn)}", fn)]
    named += [(f"argument {n} ({type(it).__name__})", it) for n, it in enumerate(args)]
    for what, value in named:
        try:
            ForkingPickler.dumps(value)
        except RuntimeError:
            pass  # Locks and queues can be sent, but only while a process starts.
        except Exception:
            yield what
