"""Builds the package, by maturin. Where that cannot work, the sentence that pip shows says what to do instead."""

from __future__ import annotations

import platform
import shutil
import sys
from typing import Any


def obstacle(system: str, is_64_bit: bool, cargo: str | None) -> str | None:
    """Why the package cannot be built here, and what to do."""
    if system != "Linux" or not is_64_bit:
        return (
            "drumline runs on 64-bit Linux only. On another system install it in a container or a virtual machine "
            "with Linux."
        )
    if cargo is None:
        return (
            "drumline is built with Rust, and there is no cargo on the PATH. Install Rust 1.95 or newer "
            "(https://rustup.rs) and a C linker, or install a wheel in place of this source: the one for this "
            f"machine is named drumline-VERSION-cp310-abi3-manylinux_..._{platform.machine()}.whl, and `make wheel` "
            "makes it in target/wheels of a checkout on a machine that has Rust."
        )
    return None


if problem := obstacle(platform.system(), sys.maxsize > 2**32, shutil.which("cargo")):
    sys.exit(problem)


def __getattr__(hook: str) -> Any:
    """Every hook is maturin's."""
    import maturin

    return getattr(maturin, hook)
