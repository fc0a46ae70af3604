"""Groups of a torch that has backends in Python: a process group of torch's holds one of ours."""

# pyright: reportIncompatibleMethodOverride=false

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Backend

from drumline.torch.calls import LONGEST
from drumline.torch.operations import Operations, Place
from drumline.torch.work import patch_holder


def create(options: Any, backend_options: Any) -> Backend:
    """Makes a backend. torch calls this for every group of this rank."""
    patch_holder()
    return DrumlineBackend(Place.of(options))


class DrumlineBackend(Operations, Backend):
    """drumline as a backend of torch's process groups."""

    def __init__(self, place: Place) -> None:
        group = place.connect()
        Backend.__init__(self, group.rank, group.world_size)
        options = Backend.Options("drumline", min(place.timeout, LONGEST))
        Operations.__init__(self, place, group, options)

    def monitored_barrier(self, opts: Any, wait_all_ranks: bool = False) -> None:
        self._monitor(opts.timeout, wait_all_ranks)

    def split(self, store: dist.Store, ranks: list[int], opts: Any) -> DrumlineBackend | None:
        if self._place.rank not in ranks:
            return None
        name = getattr(opts, "group_name", "") or f"{self._group.name}/{ranks}"
        timeout = getattr(opts, "_timeout", self._timeout)
        return DrumlineBackend(self._place.within(store, ranks, name, timeout))
