"""Error files: how a rank tells the launcher what it has raised. Their format is torch's."""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from drumline import _core
from drumline.launch.failures import ChildFailedError

_log = logging.getLogger(__name__)

_P = ParamSpec("_P")
_R = TypeVar("_R")


def record(fn: Callable[_P, _R], error_handler: ErrorHandler | None = None) -> Callable[_P, _R | None]:
    """Lets the launcher show the traceback of what ``fn`` raises, and every launcher around it, too. ::

        @record
        def main():
            ...

    Put it around the outermost function of a program. An exception goes to the file that the launcher names in
    ``TORCHELASTIC_ERROR_FILE``, and is raised again. If it is a `ChildFailedError`, the error file of the rank that
    failed first is copied there.
    """
    handler = error_handler or get_error_handler()

    @wraps(fn)
    def wrapper(*args: _P.args, **kwargs: _P.kwargs) -> _R | None:
        handler.initialize()
        try:
            return fn(*args, **kwargs)
        except SystemExit as ending:
            if ending.code == 0:
                return None
            raise
        except ChildFailedError as error:
            _, failure = error.get_first_failure()
            handler.pass_on(failure.error_file_data or {}, failure.exitcode)
            raise
        except Exception as error:
            handler.record_exception(error)
            raise

    return wrapper


class ErrorHandler:
    """Writes error files. A subclass may override ``initialize`` and ``record_exception``."""

    def initialize(self) -> None:
        """Called before the function. Lets fatal signals print Python's stack to stderr."""
        with suppress(Exception):  # stderr may be closed, or no file
            faulthandler.enable(all_threads=True)

    def record_exception(self, e: BaseException) -> None:
        """Writes the exception, and its traceback."""
        stack = "".join(traceback.format_exception(type(e), e, e.__traceback__))
        extra = {"py_callstack": stack, "timestamp": str(int(time.time()))}
        _write({"message": {"message": f"{type(e).__name__}: {e}", "extraInfo": extra}})

    def pass_on(self, data: dict[str, Any], exit_code: int) -> None:
        """Writes what the error file of a rank has, and the rank's exit code."""
        message = data.get("message")
        if isinstance(message, dict):
            data = {**data, "message": {**message, "errorCode": exit_code}}
        if message is not None:
            _write(data)


def get_error_handler() -> ErrorHandler:
    """The handler of `record`, unless it is given another one."""
    return ErrorHandler()


def _write(data: dict[str, Any]) -> None:
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    try:
        _core.write_file(path, json.dumps(data).encode())
    except OSError as error:
        _log.warning("the error file %s cannot be written: %s", path, error)
