"""Which backends of torch.distributed work on this machine.

    python examples/python/backends.py [BACKEND ...]
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

BACKENDS = ["drumline", "gloo", "nccl", "mpi"]


def problem_of(backend: str) -> str | None:
    """Sums a tensor in a group of one. Returns the error, or None if the sum is right."""
    try:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        device = "cuda" if backend == "nccl" else "cpu"
        tensor = torch.ones(3, device=device)
        dist.all_reduce(tensor)
        return None if tensor.tolist() == [1, 1, 1] else f"the sum is wrong: {tensor.tolist()}"
    except Exception as error:  # whatever a backend raises
        return str(error).strip().splitlines()[0]
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def main() -> None:
    for backend in sys.argv[1:] or BACKENDS:
        problem = problem_of(backend)
        print(f"{backend}: {'works' if problem is None else f'no: {problem}'}")


if __name__ == "__main__":
    main()
