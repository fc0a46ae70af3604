"""Programs that tests start under a launcher: ``python launched.py WHAT``."""

from __future__ import annotations

import os
import sys
import time
from typing import Any


def unmodified() -> None:
    """As a program that imports nothing of drumline, and ends without taking leave."""
    import torch
    import torch.distributed as dist

    for name in sys.argv[2:]:
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group(name)
        tensor = torch.ones(2, dtype=torch.int16) * dist.get_rank()  # gloo cannot
        dist.all_reduce(tensor)
        print(f"sum {tensor.tolist()} of {name}", flush=True)
    dist.all_reduce(torch.ones(2), async_op=True)


def callbacks() -> None:
    """Ends while callbacks run, each of which wants the interpreter again."""
    import torch
    import torch.distributed as dist

    import drumline.torch  # noqa: F401 (for torch 2.4)

    def callback(future) -> None:
        for _ in range(100):
            time.sleep(0.001)
        print("told", flush=True)

    dist.init_process_group("drumline")
    for _ in range(4):
        dist.all_reduce(torch.ones(2), async_op=True).get_future().then(callback)
    dist.destroy_process_group()


def own_api() -> None:
    import numpy as np

    import drumline

    drumline.init_process_group()
    data = np.array([drumline.get_rank() + 1])
    drumline.all_reduce(data)
    # In one piece: without buffers, `print` writes several, and another rank may write between them.
    sys.stdout.write(f"sum {data.tolist()} {'torch' in sys.modules}\n")


def one_raises() -> None:
    import numpy as np

    import drumline

    drumline.init_process_group()
    if drumline.get_rank() == 1:
        raise RuntimeError("out of patience")
    time.sleep(0.2)
    drumline.all_reduce(np.ones(2))


def loses_rank_0(api: Any = None, *backend: str) -> None:
    """Trains by shards. If there are other ranks, rank 0 is killed."""
    import hashlib
    import signal

    import torch
    from ddp_models import bits
    from test_shards import loss_of, network

    import drumline

    api = api or drumline
    api.init_process_group(*backend)
    dies = api.get_world_size() > 1 and api.get_rank() == 0
    model = drumline.DistributedDataParallel(network(), shards=6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(4):

        def loss(shard: int, number: int = number) -> torch.Tensor:
            if dies and number == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            return loss_of(model, number)(shard)

        model.step(number, loss)
        optimizer.step()
    sys.stdout.write(f"digest {hashlib.sha256(bits(model)).hexdigest()}\n")
    if api is not drumline:
        model.elastic.close()
    api.destroy_process_group()


def loses_rank_0_of_torch() -> None:
    import torch.distributed as dist

    loses_rank_0(dist, "drumline")


def waits() -> None:
    """Until it is interrupted."""
    import numpy as np

    import drumline

    drumline.init_process_group()
    drumline.barrier()
    print("waits", flush=True)
    if drumline.get_rank() == 0:
        drumline.all_reduce(np.ones(2))
    time.sleep(600)


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    programs = (unmodified, callbacks, own_api, one_raises, loses_rank_0, loses_rank_0_of_torch, waits)
    {it.__name__: it for it in programs}[sys.argv[1]]()
