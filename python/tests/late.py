"""Programs with a late rank, each a process of its own: ``python late.py WHAT RANK DIRECTORY``."""

from __future__ import annotations

import logging
import os
import sys
import time
from datetime import timedelta

RANK, DIRECTORY = int(sys.argv[2]), sys.argv[3]
WORLD_SIZE = 2
LATE_S = 4.0


class Told(logging.Handler):
    """Prints what it is told, as only a handler of the program would."""

    def emit(self, record: logging.LogRecord) -> None:
        print(f"told {record.name} {record.levelname}: {record.getMessage()}", flush=True)


def direct() -> None:
    import numpy as np

    import drumline

    drumline.init_process_group(
        f"file://{DIRECTORY}/store", rank=RANK, world_size=WORLD_SIZE, warn_after=1
    )
    if RANK == 1:
        time.sleep(LATE_S)
    drumline.all_reduce(np.ones(2, np.float32))
    drumline.destroy_process_group()


def through_torch() -> None:
    import torch
    import torch.distributed as dist

    import drumline.torch  # noqa: F401 (for torch 2.4)

    os.environ["DRUMLINE_WARN_AFTER_S"] = "1"
    store = dist.FileStore(f"{DIRECTORY}/store", WORLD_SIZE)
    dist.init_process_group("drumline", store=store, rank=RANK, world_size=WORLD_SIZE)
    dist.all_reduce(torch.ones(2))
    if RANK == 1:
        time.sleep(LATE_S)
    dist.all_reduce(torch.ones(2))
    dist.destroy_process_group()


def to_a_handler() -> None:
    logging.getLogger().addHandler(Told())
    direct()


def as_errors_only() -> None:
    logging.getLogger("drumline").setLevel(logging.ERROR)
    direct()


def as_information() -> None:
    logging.getLogger("drumline").setLevel(logging.INFO)
    to_a_handler()


def while_python_is_busy() -> None:
    """The interpreter's lock is taken while the core warns, and a fork is made meanwhile."""
    import threading

    import numpy as np

    import drumline

    group = drumline.init_process_group(
        f"file://{DIRECTORY}/store", rank=RANK, world_size=WORLD_SIZE, warn_after=1
    )
    if RANK == 1:
        time.sleep(LATE_S)
        drumline.all_reduce(np.ones(2, np.float32))
        drumline.destroy_process_group()
        return
    sys.setswitchinterval(10.0)
    work = group.all_reduce(np.ones(2, np.float32), async_op=True)
    until = time.monotonic() + LATE_S - 1
    while time.monotonic() < until:
        pass
    child = os.fork()
    if child == 0:
        # What its parent has logged is none of its own.
        import numpy

        alone = drumline.ProcessGroup.alone()
        alone.all_reduce(numpy.ones(2))
        alone.destroy()
        sys.exit(0)
    sys.setswitchinterval(0.005)
    print("fork ended with", os.waitpid(child, 0)[1], flush=True)
    work.wait()
    drumline.destroy_process_group()
    assert threading.active_count() < 10


def and_ends() -> None:
    """The program ends while the core has just warned, and a handler is slow."""

    class Slow(Told):
        def emit(self, record: logging.LogRecord) -> None:
            time.sleep(0.5)
            super().emit(record)

    import numpy as np

    import drumline

    logging.getLogger().addHandler(Slow())
    drumline.init_process_group(
        f"file://{DIRECTORY}/store", rank=RANK, world_size=WORLD_SIZE, warn_after=1
    )
    if RANK == 1:
        time.sleep(LATE_S)
        return
    work = drumline.all_reduce(np.ones(2, np.float32), async_op=True)
    assert work is not None and not work.wait(timedelta(seconds=1.2))


if __name__ == "__main__":
    {
        f.__name__: f
        for f in (
            direct, through_torch, to_a_handler, as_errors_only, as_information,
            while_python_is_busy, and_ends,
        )
    }[sys.argv[1]]()  # fmt: skip
