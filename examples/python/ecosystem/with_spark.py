"""Spark's TorchDistributor on CPUs, which starts the ranks by torchrun. Needs Java 17.

    python with_spark.py --workers 2
"""

from __future__ import annotations

import argparse


def train(backend: str) -> list[float]:
    import torch
    import torch.distributed as dist

    dist.init_process_group(backend)
    torch.manual_seed(1)
    model = torch.nn.parallel.DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for _ in range(5):
        x = torch.randn(10, 8, generator=generator)
        loss = torch.nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item())
    dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    from pyspark.ml.torch.distributor import TorchDistributor
    from pyspark.sql import SparkSession

    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--backend", default="drumline")
    args = parser.parse_args()

    spark = SparkSession.builder.master(f"local[{args.workers}]").getOrCreate()
    distributor = TorchDistributor(num_processes=args.workers, local_mode=True, use_gpu=False)
    for step, loss in enumerate(distributor.run(train, args.backend)):
        print(f"step {step}: loss {loss:.9f}")
    spark.stop()
