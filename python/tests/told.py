"""A rank of test_command_lines.py. It writes down what its launcher gave it, and then does what its arguments ask for.

An argument asks by ``do=WHAT``, for one rank by ``do=WHAT@RANK``, and for the first start alone by ``do=WHAT@RANK!``.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import time
from pathlib import Path

RANK, START = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
NAME = f"start {START}, rank {RANK}"
FOLDER = Path(os.environ["TOLD"])
HEARD = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2]


def tell(what: str, content: object) -> None:
    """A reader finds all of it or nothing."""
    draft = FOLDER / f".{NAME}, {what}"
    draft.write_text(json.dumps(content))
    draft.rename(FOLDER / f"{NAME}, {what}.json")


def heard(number: int) -> None:
    """Tells which signal came. Dies of those that end a program."""
    tell("signal", signal.Signals(number).name)
    if number in (signal.SIGUSR1, signal.SIGUSR2):
        sys.exit(0)
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HEARD)


def ready() -> None:
    tell("ready", os.getpid())


def wait() -> None:
    """Until a signal comes. It is blocked until then, so none comes too early to end the wait. The launcher looks for
    handlers."""
    for number in HEARD:
        signal.signal(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_BLOCK, HEARD)
    ready()
    heard(signal.sigwait(HEARD))


def ignore() -> None:
    """Until SIGKILL comes."""
    for number in HEARD:
        signal.signal(number, signal.SIG_IGN)
    ready()
    while True:
        signal.pause()


def meet() -> None:
    """Waits until all ranks are ready."""
    ready()
    while len([*FOLDER.glob(f"start {START}, *, ready.json")]) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.01)


def leave(how: str) -> None:
    """By an exit code or a signal, as soon as no rank misses it."""
    meet()
    if how.isdigit():
        sys.exit(int(how))
    os.kill(os.getpid(), signal.Signals[how])


def read() -> None:
    tell("stdin", sys.stdin.read())


def record() -> None:
    """Raises an error under torch's ``@record``, as soon as no rank misses it."""
    meet()
    from torch.distributed.elastic.multiprocessing.errors import record

    @record
    def train() -> None:
        raise RuntimeError("out of patience")

    train()


def main() -> None:
    ignored = [number for number in HEARD if signal.getsignal(number) is signal.SIG_IGN]
    tell("got", {
        "environment": dict(os.environ),
        "arguments": sys.argv[1:],
        "python": [sys.prefix, os.path.realpath(sys.executable)],
        "unbuffered": bool(sys.stdout.write_through),
        "folder": os.getcwd(),
        "path": sys.path[0],
        "name": __name__ + (f" of {__spec__.name}" if __spec__ else ""),
        "ignored signals": [number.name for number in ignored],
        "group leader": os.getpgid(0) == os.getpid(),
        "session leader": os.getsid(0) == os.getpid(),
        "descriptors": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
    })  # fmt: skip
    # In one piece each: without buffers, `print` writes several, and another rank may write between them.
    sys.stdout.write(f"out {RANK}\n")
    sys.stderr.write(f"err {RANK}\n")
    asked = [word.removeprefix("do=") for word in sys.argv[1:] if word.startswith("do=")]
    for deed, _, whom in (word.partition("@") for word in asked):
        if whom.strip("!") not in ("", RANK) or whom.endswith("!") and START != "0":
            continue
        what, _, how = deed.partition(":")
        {"leave": lambda: leave(how), "wait": wait, "ignore": ignore, "read": read, "record": record}[what]()


if __name__ == "__main__":
    main()
