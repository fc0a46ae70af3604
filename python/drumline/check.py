"""``python -m drumline.check``: what works on this machine.

Runs ``drumline check``, and then tries the package: an operation between two processes on arrays of
numpy's, and, if torch is there, a step of training and torch's backend.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np

import drumline
from drumline.torch.register import too_old


def main() -> int:
    """Tries everything; the exit code says whether all of it worked."""
    print(f"drumline {drumline.__version__}, Python {sys.version.split()[0]}, numpy {np.__version__}")
    failed = subprocess.run([sys.executable, "-m", "drumline", "check"], check=False).returncode
    failed |= _try("2 processes on numpy", _on_numpy)
    try:
        import torch
    except ImportError:
        print("torch is not installed: DistributedDataParallel and the backend were not tried")
        return failed
    failed |= _try(f"2 processes train with torch {torch.__version__}", _on_ddp)
    if why := too_old():
        print(f"the backend was not tried: {why}")
        return failed
    failed |= _try(f"2 processes as backend of torch {torch.__version__}", _on_torch)
    return failed


def _try(what: str, function: Callable[[int, str], None]) -> int:
    try:
        with tempfile.TemporaryDirectory() as directory:
            # Forks need not import torch again.
            drumline.spawn(function, (directory,), nprocs=2, start_method="fork")
    except drumline.ProcessRaisedError as error:
        print(f"FAILED: {what}\n{error}")
        return 1
    print(f"ok: {what}")
    return 0


def _on_numpy(rank: int, directory: str) -> None:
    group = drumline.init_process_group()
    data = np.full(1000, rank + 1.0, np.float32)
    group.all_reduce(data)
    _must_be_3(data)
    group.destroy()


def _on_ddp(rank: int, directory: str) -> None:
    import torch

    from drumline.ddp import DistributedDataParallel

    drumline.init_process_group()
    model = DistributedDataParallel(torch.nn.Linear(2, 1, bias=False))
    model(torch.full((1, 2), 2.0 * rank + 2.0)).sum().backward()
    _must_be_3(model.module.weight.grad)
    model.reducer.stop()
    drumline.destroy_process_group()


def _on_torch(rank: int, directory: str) -> None:
    import torch
    import torch.distributed as dist

    store = dist.FileStore(os.path.join(directory, "store"), 2)
    dist.init_process_group("drumline", store=store, rank=rank, world_size=2)
    data = torch.full((1000,), rank + 1.0)
    dist.all_reduce(data)
    _must_be_3(data)
    dist.destroy_process_group()


def _must_be_3(data: Any) -> None:
    if not bool((data == 3.0).all()):
        raise RuntimeError(f"the sum should be 3 everywhere, and is {data}")


if __name__ == "__main__":
    sys.exit(main())
