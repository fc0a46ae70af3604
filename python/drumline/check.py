"""``python -m drumline.check``: what works on this machine.

Runs ``drumline check``, and then tries the package: an operation between two processes on arrays of
numpy's, and as torch's backend if torch is there.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile

import numpy as np

import drumline


def main() -> int:
    """Tries everything; the exit code says whether all of it worked."""
    print(f"drumline {drumline.__version__}, Python {sys.version.split()[0]}, numpy {np.__version__}")
    failed = subprocess.run([sys.executable, "-m", "drumline", "check"], check=False).returncode
    failed |= _try("2 processes on numpy", _on_numpy)
    try:
        import torch
    except ImportError:
        print("torch is not installed: its backend was not tried")
        return failed
    failed |= _try(f"2 processes as backend of torch {torch.__version__}", _on_torch)
    return failed


def _try(what: str, function: object) -> int:
    try:
        with tempfile.TemporaryDirectory() as directory:
            drumline.spawn(function, (directory,), nprocs=2)  # type: ignore[arg-type]
    except drumline.ProcessRaisedError as error:
        print(f"FAILED: {what}\n{error}")
        return 1
    print(f"ok: {what}")
    return 0


def _on_numpy(rank: int, directory: str) -> None:
    group = drumline.init_process_group()
    data = np.full(1000, rank + 1.0, np.float32)
    group.all_reduce(data)
    assert (data == 3.0).all(), data
    group.destroy()


def _on_torch(rank: int, directory: str) -> None:
    import torch
    import torch.distributed as dist

    store = dist.FileStore(os.path.join(directory, "store"), 2)
    dist.init_process_group("drumline", store=store, rank=rank, world_size=2)
    data = torch.full((1000,), rank + 1.0)
    dist.all_reduce(data)
    assert (data == 3.0).all(), data
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
