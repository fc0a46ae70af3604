"""Lightning's Trainer on CPUs: logged values over all ranks, validation, a checkpoint, and resuming from it.

    drumline run --nproc-per-node 2 -- python with_lightning.py
"""

from __future__ import annotations

import os
import sys
import tempfile
import warnings

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader, TensorDataset

BACKEND = sys.argv[1] if len(sys.argv) > 1 else "drumline"


class Regression(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = torch.nn.Sequential(
            torch.nn.Linear(8, 16, bias=False),  # BatchNorm would make its gradient one of rounding alone
            torch.nn.BatchNorm1d(16),
            torch.nn.ReLU(),
            torch.nn.Linear(16, 1),
        )

    def loss(self, batch: list[torch.Tensor]) -> torch.Tensor:
        x, y = batch
        return torch.nn.functional.mse_loss(self.model(x), y)

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        loss = self.loss(batch)
        self.log("training", loss, on_epoch=True, on_step=False, sync_dist=True)
        return loss

    def validation_step(self, batch: list[torch.Tensor]) -> None:
        self.log("validation", self.loss(batch), sync_dist=True)

    def on_train_epoch_end(self) -> None:
        values = {name: float(self.trainer.callback_metrics[name]) for name in ("training", "validation")}
        text = ", ".join(f"{name} {value:.9f}" for name, value in values.items())
        self.print(f"epoch {self.current_epoch}: {text}")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def new_trainer(epochs: int) -> L.Trainer:
    return L.Trainer(
        accelerator="cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        strategy=DDPStrategy(process_group_backend=BACKEND),
        max_epochs=epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


warnings.filterwarnings("ignore", ".*num_workers")  # two workers would be slower here
L.seed_everything(1, verbose=False)
inputs = torch.randn(120, 8)
data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
loaders = {
    "train_dataloaders": DataLoader(data, batch_size=10, shuffle=True),
    "val_dataloaders": DataLoader(data, batch_size=20),
}
trainer, model = new_trainer(2), Regression()
trainer.fit(model, **loaders)
where = [tempfile.mkdtemp() if trainer.is_global_zero else ""]
dist.broadcast_object_list(where)
trainer.save_checkpoint(f"{where[0]}/model.ckpt")
resumed = new_trainer(3)
resumed.fit(Regression(), ckpt_path=f"{where[0]}/model.ckpt", **loaders)
dist.destroy_process_group()
