"""Times torch's gloo all_reduce on two ranks over loopback.

The counterpart of crates/drumline/examples/all_reduce_speed.rs: same sizes, same repetitions,
buffers rewritten before each operation, same columns.
"""

import datetime
import socket
import sys
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def measure(rank: int, world_size: int, port: int) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, world_size, rank == 0, datetime.timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    if rank == 0:
        print(f"all_reduce(sum) of f32, {world_size} ranks, gloo of torch {torch.__version__}")
        print(f"{'bytes':>12} {'min us':>12} {'median us':>12} {'max us':>12} {'GB/s':>10}")
    for shift in (3, 5, 8, 11, 14, 17, 20, 23, 26):
        size = 1 << shift
        buffer = torch.zeros(size // 4)
        repetitions = min(max((64 << 20) // size, 10), 1000)
        times = []
        for _ in range(repetitions + 3):
            buffer.fill_(1.0)
            dist.barrier()
            start = time.perf_counter()
            dist.all_reduce(buffer)
            times.append(time.perf_counter() - start)
        times = sorted(times[3:])
        median = times[len(times) // 2]
        if rank == 0:
            print(
                f"{size:>12} {times[0] * 1e6:>12.1f} {median * 1e6:>12.1f} "
                f"{times[-1] * 1e6:>12.1f} {size / median / 1e9:>10.3f}",
                flush=True,
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    ranks = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        free_port = probe.getsockname()[1]
    mp.spawn(measure, args=(ranks, free_port), nprocs=ranks)
