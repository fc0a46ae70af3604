"""Ray Train on CPUs, which starts the ranks itself.

    python with_ray.py --workers 2
"""

from __future__ import annotations

import argparse
from typing import Any


def train(settings: dict[str, Any]) -> None:
    import ray.train
    import ray.train.torch
    import torch
    import torch.distributed as dist

    torch.manual_seed(1)
    model = ray.train.torch.prepare_model(
        torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    inputs = torch.randn(120, 8, generator=torch.Generator().manual_seed(2))
    data = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
    loader = ray.train.torch.prepare_data_loader(torch.utils.data.DataLoader(data, batch_size=10))
    lines = []
    for epoch in range(3):
        total = torch.zeros(())
        for x, y in loader:
            loss = torch.nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach()
        dist.all_reduce(total)
        lines.append(f"epoch {epoch}: loss {total:.9f} on {dist.get_backend()}")
        ray.train.report({"loss": total.item()})
    if ray.train.get_context().get_world_rank() == 0:
        with open(settings["out"], "w") as file:
            file.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    import tempfile

    import ray
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--backend", default="drumline")
    args = parser.parse_args()

    ray.init(num_cpus=args.workers + 1, include_dashboard=False)
    directory = tempfile.mkdtemp()
    result = TorchTrainer(
        train,
        train_loop_config={"out": f"{directory}/losses.txt"},
        torch_config=TorchConfig(backend=args.backend),
        scaling_config=ScalingConfig(num_workers=args.workers, use_gpu=False),
        run_config=RunConfig(storage_path=directory),
    ).fit()
    print(open(f"{directory}/losses.txt").read(), end="")
    ray.shutdown()
