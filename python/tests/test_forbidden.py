"""System calls that a container forbids: the job works, or the error names the call and what to do."""

import ctypes
import errno
import platform
import struct
import subprocess
import sys
from collections.abc import Callable

import pytest

NUMBERS = {
    "memfd_create": 319,
    "clone3": 435,
    "eventfd2": 290,
    "epoll_create1": 291,
    "pidfd_open": 434,
    "prlimit64": 302,
    "sysinfo": 99,
}
RANK = "import drumline; drumline.init_process_group().barrier(); print('met', flush=True)"
JOB = [sys.executable, "-m", "drumline", "run", "--nproc-per-node", "2", "--", sys.executable, "-c", RANK]

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="the numbers of calls are those of x86-64")


def forbid(number: int, error: int) -> Callable[[], None]:
    """For a process that has been forked: from now on this system call fails with this error."""
    # Load the number of the call; if it is this one, refuse it; else allow it.
    steps = [
        (0x20, 0, 0, 0),
        (0x15, 0, 1, number),
        (0x06, 0, 0, 0x0005_0000 | error),
        (0x06, 0, 0, 0x7FFF_0000),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    prctl = ctypes.CDLL(None).prctl

    def apply() -> None:
        no_new_privileges, set_seccomp, with_filter = 38, 22, 2
        program = struct.pack("HxxxxxxQ", len(steps), ctypes.addressof(code))
        refused = prctl(no_new_privileges, 1, 0, 0, 0) or prctl(set_seccomp, with_filter, program, 0, 0)
        if refused:
            raise OSError("no filter of system calls here")

    return apply


@pytest.mark.parametrize(
    ("call", "error", "works"),
    [
        ("memfd_create", errno.EPERM, False),
        ("memfd_create", errno.ENOSYS, False),
        ("clone3", errno.EPERM, False),
        ("clone3", errno.ENOSYS, True),
        ("eventfd2", errno.EPERM, False),
        ("epoll_create1", errno.EPERM, False),
        ("pidfd_open", errno.ENOSYS, False),
        ("prlimit64", errno.EPERM, True),
        ("sysinfo", errno.EPERM, True),
    ],
)
def test_a_forbidden_call_is_named(call: str, error: int, works: bool) -> None:
    refuse = forbid(NUMBERS[call], error)
    done = subprocess.run(JOB, preexec_fn=refuse, capture_output=True, text=True, timeout=120)
    told = done.stdout + done.stderr
    assert "panicked" not in told, told
    if works:
        assert (done.returncode, done.stdout.count("met")) == (0, 2), told
    else:
        assert done.returncode != 0, told
        assert f"{call}: " in told or f"({call}): " in told, told
        assert "a filter of system calls (seccomp)" in told, told
