"""Groups, models and comparisons that the tests of drumline.DistributedDataParallel share."""

from __future__ import annotations

import pytest
from torch_versions import HAS_BACKENDS

torch = pytest.importorskip("torch")
import torch._dynamo  # noqa: E402  optimizers do, which takes seconds on every rank
import torch.distributed as dist  # noqa: E402

import drumline  # noqa: E402

# OpenMP's threads do not survive the fork of a rank, which would wait for them.
torch.set_num_threads(1)

# Of groups that torch makes. The wrapper is the same on all.
KINDS = ("gloo", "drumline") if HAS_BACKENDS else ("gloo",)


def connect(rank, world_size, directory, kind=KINDS[-1], **options):
    """A group, and how it is left."""
    path = f"{directory}/{kind}"
    if kind == "plain":
        store = drumline.FileStore(path, world_size)
        drumline.init_process_group(store=store, rank=rank, world_size=world_size)
        return drumline.destroy_process_group
    store = dist.FileStore(path, world_size)
    dist.init_process_group(kind, store=store, rank=rank, world_size=world_size, **options)
    return dist.destroy_process_group


def network():
    torch.manual_seed(5)
    layers = [torch.nn.Linear(12, 40), torch.nn.BatchNorm1d(40), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(40, 3))


def train(model, rank, steps=50):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    generator = torch.Generator().manual_seed(11)
    losses = []
    for step in range(steps):
        x = torch.randn(2, 16, 12, generator=generator)[rank]
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        loss = (model(x) - x[:, :3].sin()).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def bits(model):
    return b"".join(it.detach().numpy().tobytes() for it in model.parameters())


def small():
    torch.manual_seed(0)
    layers = torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 4)
    return torch.nn.Sequential(*layers)


def batch(rank, step):
    return torch.randn(5, 3, generator=torch.Generator().manual_seed(10 * rank + step))


def mean_of(world_size, module_of, train):
    """The mean over ranks of the gradients of ``train(module, rank)`` in one process."""
    mean = None
    for rank in range(world_size):
        alone = module_of()
        train(alone, rank)
        of_rank = [None if it.grad is None else it.grad / world_size for it in alone.parameters()]
        mean = [
            b if a is None else a if b is None else a + b
            for a, b in zip(mean or [None] * len(of_rank), of_rank, strict=True)
        ]
    return mean


def differing(parameters, mean, **near):
    """Which parameters have another gradient."""
    return [
        at
        for at, (it, right) in enumerate(zip(parameters, mean, strict=True))
        if (it.grad is None) != (right is None)
        or (right is not None and not torch.allclose(it.grad.to(right.dtype), right, **near))
    ]


class Odd(torch.nn.Module):
    """Some parameters take part if they are asked for; one is used twice, one is frozen."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.first = torch.nn.Linear(4, 4)
        self.second = torch.nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.extra = torch.nn.Linear(4, 4)
        self.frozen = torch.nn.Parameter(torch.ones(4), requires_grad=False)

    def forward(self, x, extra=True):
        x = self.second(self.first(x)) * self.frozen
        return self.extra(x) if extra else x


def gradients(model):
    return [None if it.grad is None else it.grad.tolist() for it in model.parameters()]


class Checkpointed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.shared = torch.nn.Linear(4, 4)
        self.never = torch.nn.Linear(4, 4)

    def forward(self, x):
        from torch.utils.checkpoint import checkpoint

        for _ in range(2):
            x = checkpoint(self.shared, x, use_reentrant=True)
        return x
