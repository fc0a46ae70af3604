"""Which samples each rank sees: torch's order exactly, and what torch's sampler cannot do."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sized
from typing import Any

from drumline import _core


class DistributedSampler:
    """Deals the samples of a data set out to the ranks, equally many to each.

    A drop-in for ``torch.utils.data.distributed.DistributedSampler``, with the same order for the
    same arguments. An epoch that was interrupted goes on where it was, also with another number of
    ranks: see `state_dict`.

    ``num_replicas`` and ``rank`` are those of the default group unless given: drumline's, or torch's
    if there is none of drumline's.
    """

    def __init__(
        self,
        dataset: Sized,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        if num_replicas is None:
            num_replicas = int(_default_group().get_world_size())
        if rank is None:
            rank = int(_default_group().get_rank())
        self.dataset = dataset
        self.num_replicas, self.rank = num_replicas, rank
        self.shuffle, self.seed, self.drop_last = shuffle, seed, drop_last
        self.epoch = 0
        samples = len(dataset)
        self._core = _core.Sampler(samples, num_replicas, rank, shuffle, seed, drop_last)

    def __iter__(self) -> Iterator[int]:
        return iter(self._core.indices())

    def __len__(self) -> int:
        return len(self._core)

    def set_epoch(self, epoch: int) -> None:
        """Chooses the order of an epoch and goes to its start. Call it before each."""
        self.epoch = epoch
        self._core.set_epoch(epoch)

    def advance(self, samples: int) -> None:
        """Marks ``samples`` further samples of this rank as used: the next iteration begins after them."""
        self._core.advance(samples)

    def state_dict(self) -> dict[str, Any]:
        """Where all ranks are, for a checkpoint. The same on all ranks."""
        return {"epoch": self.epoch, "state": self._core.state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from ``state``, with any number of ranks.

        Raises ValueError if ``state`` comes from other data or settings.
        """
        self._core.resume(state["state"])
        self.epoch = state["epoch"]


def _default_group() -> Any:
    """The module whose ``get_rank`` and ``get_world_size`` serve the sampler."""
    from drumline import _world, default

    torch = sys.modules.get("torch")
    if _world.is_initialized() or torch is None or not torch.distributed.is_initialized():
        return default
    return torch.distributed


def evaluation_shard(samples: int, world_size: int, rank: int) -> range:
    """The samples of one rank when none may be seen twice.

    >>> [list(evaluation_shard(5, 2, rank)) for rank in (0, 1)]
    [[0, 1, 2], [3, 4]]
    """
    start, stop = _core.Sampler.shard(samples, world_size, rank)
    return range(start, stop)
