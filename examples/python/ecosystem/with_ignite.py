"""Ignite's idist on CPUs: a trainer, an evaluator and metrics over all ranks.

    DRUMLINE_REPLACE_GLOO=1 drumline run --nproc-per-node 2 -- python with_ignite.py

Ignite looks at the name of the backend: ``idist.auto_model`` makes a DistributedDataParallel for nccl, gloo and
mpi, and leaves the model alone for any other. So drumline goes under the name gloo.
"""

from __future__ import annotations

from typing import Any

import ignite.distributed as idist
import torch
from ignite.engine import Engine, Events, create_supervised_evaluator
from ignite.metrics import Loss, MeanAbsoluteError
from torch.utils.data import TensorDataset


def train(local_rank: int) -> None:
    torch.manual_seed(1)
    inputs = torch.randn(120, 8)
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    loader = idist.auto_dataloader(data, batch_size=30, shuffle=False)
    model = idist.auto_model(
        torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    )
    assert isinstance(model, torch.nn.parallel.DistributedDataParallel), "each rank would train alone"
    optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), lr=0.05))
    criterion = torch.nn.MSELoss()

    def step(_: Engine, batch: Any) -> float:
        x, y = batch
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    trainer = Engine(step)
    evaluator = create_supervised_evaluator(
        model, metrics={"loss": Loss(criterion), "error": MeanAbsoluteError()}
    )

    @trainer.on(Events.EPOCH_COMPLETED)
    def evaluate() -> None:
        metrics = evaluator.run(loader).metrics
        if idist.get_rank() == 0:
            text = ", ".join(f"{name} {value:.9f}" for name, value in metrics.items())
            print(f"epoch {trainer.state.epoch}: {text}")

    trainer.run(loader, max_epochs=3)
    names, total = idist.all_gather(f"rank {idist.get_rank()}"), idist.all_reduce(1.5)
    if idist.get_rank() == 0:
        print(f"{names}, sum {total}")


with idist.Parallel(backend="gloo") as parallel:
    parallel.run(train)
