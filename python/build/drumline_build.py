"""Builds the package, by maturin. Where that cannot work, the sentence that pip shows says what to do instead.

maturin compiles the extension. The command ``drumline`` is compiled here, and lies beside the extension in the wheel:
a job is sooner started if no interpreter has to start first. ``drumline_build.py cargo build --locked`` compiles it
alone, for `make wheel`.
"""

from __future__ import annotations

import json
import pathlib
import platform
import shutil
import subprocess
import sys
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
# pip installs these files beside the interpreter, as they are: [tool.maturin] data in pyproject.toml.
SCRIPTS = ROOT / "target/drumline.data/scripts"


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


def compile_command(*cargo: str) -> None:
    """Compiles the command ``drumline`` by ``cargo``, and puts it where maturin finds it."""
    # With the package of the extension beside it, cargo takes the same features of dependencies as maturin, and they are
    # compiled once.
    packages = ["--package=drumline-cli", "--package=drumline-python", "--bin=drumline"]
    strip = ["--config", 'profile.release.package.drumline-cli.strip="symbols"']
    options = ["--release", *packages, *strip, "--message-format=json-render-diagnostics"]
    done = subprocess.run([*cargo, *options], cwd=ROOT, stdout=subprocess.PIPE)
    if done.returncode:
        sys.exit("cargo cannot compile the command drumline: the reason stands above")
    made = (json.loads(line).get("executable") for line in done.stdout.splitlines())
    # Not written over: it may be running.
    (SCRIPTS / "drumline").unlink(missing_ok=True)
    shutil.copy(next(path for path in made if path), SCRIPTS)


if problem := obstacle(platform.system(), sys.maxsize > 2**32, shutil.which("cargo")):
    sys.exit(problem)

# maturin wants it to be there, also for what needs no command.
SCRIPTS.mkdir(parents=True, exist_ok=True)


def build_wheel(*arguments: Any, **options: Any) -> str:
    compile_command("cargo", "build")
    return maturins("build_wheel")(*arguments, **options)


def build_editable(*arguments: Any, **options: Any) -> str:
    compile_command("cargo", "build")
    return maturins("build_editable")(*arguments, **options)


def maturins(hook: str) -> Any:
    import maturin

    return getattr(maturin, hook)


# All other hooks are maturin's.
__getattr__ = maturins

if __name__ == "__main__":
    compile_command(*sys.argv[1:])
