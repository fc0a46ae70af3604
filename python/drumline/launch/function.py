"""How a function gets to ranks, and its results back: by files in a directory of this user's own."""

from __future__ import annotations

import multiprocessing.process
import multiprocessing.spawn
import os
import pickle
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from drumline import _core, _pickling
from drumline.launch.recorded import record

# The exit code that says that another start would end in the same way.
_USELESS = 2

_INSTEAD = "install cloudpickle, which sends them whole"

# Whether this process is a rank that imports the program.
_imports_program = False


def send(fn: Callable[..., Any], args: Sequence[Any], directory: Path) -> list[str]:
    """Puts the function and its arguments there. Returns the command that calls it, once for each rank."""
    if _imports_program:
        raise RuntimeError(
            "this rank imports the program, and the program launches ranks again: put what starts the job behind "
            '`if __name__ == "__main__":`'
        )
    preparation = multiprocessing.spawn.get_preparation_data("rank")
    # It refuses to be pickled, except by multiprocessing. Ranks need it for managers of this process.
    preparation["authkey"] = bytes(multiprocessing.process.current_process().authkey)
    message = pickle.dumps((preparation, _pickled(fn, args)))
    _file(directory).write_bytes(message)
    return [sys.executable, "-u", "-m", "drumline.launch.rank", str(directory), "${local_rank}"]


def result(directory: Path, local_rank: int) -> Any:
    """What the function has returned there; None if its process has ended without a return."""
    with suppress(FileNotFoundError):
        return pickle.loads(_result(directory, local_rank).read_bytes())


def call() -> None:
    """A rank: calls the function."""
    directory, local_rank = Path(sys.argv[1]), int(sys.argv[2])
    # Of a rank that had ended well before the others started again.
    _result(directory, local_rank).unlink(missing_ok=True)
    try:
        record(_call)(directory, local_rank)
    except _NotLoaded as error:
        traceback.print_exception(error)
        # A disk or memory that fails may be there again for the next start.
        may_pass = isinstance(error.__cause__, (OSError, MemoryError))
        sys.exit(1 if may_pass and not isinstance(error.__cause__, FileNotFoundError) else _USELESS)


def _pickled(fn: Callable[..., Any], args: Sequence[Any]) -> bytes:
    is_importable = _pickling.is_importable(fn)
    try:
        if is_importable:
            return pickle.dumps((fn, tuple(args)))
        why = _pickling.not_importable(fn, _INSTEAD)
    except Exception as error:
        why = _pickling.not_picklable(fn, args, error, _INSTEAD)
        why.__cause__ = error
    try:
        cloudpickle = import_module("cloudpickle")
    except ImportError:
        raise why from why.__cause__
    try:
        whole: bytes = cloudpickle.dumps((fn, tuple(args)))
        return whole
    except Exception as error:
        raise _pickling.not_picklable(fn, args, error, "give ranks what they can make it from") from error


def _call(directory: Path, local_rank: int) -> None:
    """What a rank does."""
    fn, args = _loaded(directory)
    value = fn(*args)
    try:
        pickled = pickle.dumps(value)
    except Exception as error:
        raise pickle.PicklingError(
            f"the result of {_pickling.name(fn)}, a {type(value).__name__}, cannot be sent back: {error}"
        ) from error
    _core.write_file(os.fspath(_result(directory, local_rank)), pickled)


def _loaded(directory: Path) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The function and its arguments, in a process that looks like the one that sent them."""
    global _imports_program
    process: Any = multiprocessing.process.current_process()
    _imports_program = process._inheriting = True
    try:
        preparation, pickled = pickle.loads(_file(directory).read_bytes())
        multiprocessing.spawn.prepare(preparation)
        fn, args = pickle.loads(pickled)
    except (Exception, SystemExit) as error:
        raise _NotLoaded(f"this rank cannot load the function or its arguments: {error}") from error
    finally:
        del process._inheriting
        _imports_program = False
    return fn, args


class _NotLoaded(RuntimeError):
    pass


def _file(directory: Path) -> Path:
    return directory / "function"


def _result(directory: Path, local_rank: int) -> Path:
    return directory / f"result-{local_rank}"
