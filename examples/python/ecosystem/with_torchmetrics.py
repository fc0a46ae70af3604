"""Metrics of torchmetrics over all ranks: sums, lists of different lengths, and a collection.

    drumline run --nproc-per-node 2 -- python with_torchmetrics.py
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC, MulticlassConfusionMatrix

dist.init_process_group(sys.argv[1] if len(sys.argv) > 1 else "drumline")
rank = dist.get_rank()
mean = MeanMetric()
metrics = MetricCollection({
    "accuracy": MulticlassAccuracy(num_classes=4),
    "confusion": MulticlassConfusionMatrix(num_classes=4),
    # Keeps every sample. Ranks have different numbers of them.
    "auroc": MulticlassAUROC(num_classes=4),
})
generator = torch.Generator().manual_seed(rank)
for batch in range(3):
    samples = 10 + rank * batch
    scores = torch.randn(samples, 4, generator=generator).softmax(1)
    classes = torch.randint(4, (samples,), generator=generator)
    metrics.update(scores, classes)
    mean.update(scores.square())
values, mean_of_all = metrics.compute(), mean.compute()
if rank == 0:
    print(f"accuracy {values['accuracy']:.9f}, auroc {values['auroc']:.9f}, mean {mean_of_all:.9f}")
    print(f"confusion {values['confusion'].flatten().tolist()}")
dist.destroy_process_group()
