"""The core's log as records of `logging`, under the loggers ``drumline.*``.

Nobody imports this: the core does, when a program first uses it.
"""

from __future__ import annotations

import atexit
import logging
import sys
import traceback

from drumline import _core

Record = tuple[int, str, str, str, int, float, str]
"""Level, target, text, source file, line, seconds since 1970, and the thread."""

# Time limit, in seconds, for records that are on their way when the interpreter ends.
_PATIENCE_S = 5.0

_root = logging.getLogger("drumline")


def begin(level: int | None) -> None:
    """Prepares for records. ``level`` is that of RUST_LOG: it holds unless the program has chosen another."""
    if level is not None and _root.level == logging.NOTSET:
        _root.setLevel(level)
    # Groups are closed before this, by a function that is registered later.
    atexit.unregister(_core.close_log)
    atexit.register(_core.close_log, _PATIENCE_S)


def tell(records: list[Record], dropped: int) -> None:
    """Hands records to the handlers of the program; where it has none, they go to stderr."""
    for level, target, text, file, line, at, thread in records:
        logger = logging.getLogger(_name(target))
        if not logger.isEnabledFor(level):
            continue
        record = logger.makeRecord(logger.name, level, file, line, text, (), None)
        record.created, record.msecs = at, at % 1 * 1000
        record.threadName = thread or record.threadName
        try:
            _emit(logger, record)
        except Exception:  # of a handler; other records are for others
            traceback.print_exc()
    if dropped:
        _root.warning("%s records of the log were dropped: there were too many at once", dropped)


def say(logger: logging.Logger, level: int, text: str) -> None:
    """Hands a text of the package itself to the handlers of the program, or to stderr."""
    if logger.isEnabledFor(level):
        _emit(logger, logger.makeRecord(logger.name, level, __file__, 0, text, (), None))


def _emit(logger: logging.Logger, record: logging.LogRecord) -> None:
    if logger.hasHandlers():
        logger.handle(record)
    elif logging.lastResort is not None:  # without it, the program wants no such text
        print(f"drumline {record.levelname}: {record.msg}", file=sys.stderr, flush=True)


def _name(target: str) -> str:
    """The logger of a module of Rust's: drumline_engine::lane is drumline.engine.lane."""
    return target.replace("drumline_", "drumline.", 1).replace("::", ".")
