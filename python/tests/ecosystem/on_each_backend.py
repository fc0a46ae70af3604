"""Runs an example on one backend after another: ``python on_each_backend.py drumline,gloo PROGRAM ARGS ...``.

The word BACKEND among the arguments stands for the name. Libraries take long to import: so it is done once.
Name each backend once: gloo hangs if a job makes its group a second time.
"""

from __future__ import annotations

import os
import runpy
import sys

import torch.distributed as dist


def main() -> None:
    backends, program, *arguments = sys.argv[1:]
    # Who frees a group of gloo holds the interpreter, and waits for a thread that may want it, too. So neither such a group is
    # freed, nor torch's DDP, which holds it.
    kept: list[object] = []
    begin = dist.init_process_group

    def begin_and_keep(*args: object, **options: object) -> None:
        begin(*args, **options)
        if dist.get_backend() == "gloo":
            kept.append(dist.group.WORLD)

    dist.init_process_group = begin_and_keep
    for backend in backends.split(","):
        print(f"on {backend}:", flush=True)
        sys.argv = [program, *(argument.replace("BACKEND", backend) for argument in arguments)]
        variables = runpy.run_path(program, run_name="__main__")
        if backend == "gloo":
            kept.append(variables)
        forget()
    # Threads of gloo's outlive its groups; one that wants the interpreter at its end aborts this.
    sys.stdout.flush()
    os._exit(0)


def forget() -> None:
    """accelerate keeps the first group of a process in mind."""
    if "accelerate" in sys.modules:
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(True)
        GradientState._reset_state()


if __name__ == "__main__":
    main()
