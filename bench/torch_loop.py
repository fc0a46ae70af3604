"""Times torch's collectives on a backend, in every process of a job, as gloo_loop.py does in processes of its own.

    RANK=0 WORLD_SIZE=8 MASTER_ADDR=... python bench/torch_loop.py drumline 500 all_gather:16777216
"""

import sys

import torch.distributed as dist

import drumline  # noqa: F401  (registers the backend)
from gloo_loop import time_cases

if __name__ == "__main__":
    dist.init_process_group(sys.argv[1])
    time_cases(float(sys.argv[2]), sys.argv[3:])
    dist.destroy_process_group()
