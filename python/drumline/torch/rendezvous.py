"""``mpi://``: ranks that MPI has started meet, and torch gets their store."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from drumline import _core
from drumline.stores import of_core
from drumline.torch.store import TorchStore
from drumline.torch.work import as_dist_error

# torch may wrap a store and drop its Python object, which must live on. The next rendezvous replaces it.
_living: list[TorchStore] = []


def over_mpi(
    url: str, timeout: timedelta | None = None, **_: Any
) -> Iterator[tuple[TorchStore, int, int]]:
    """A rendezvous handler of torch's. Groups on the store that it yields are on the backend ``mpi``."""
    settings = {} if timeout is None else {"timeout": timeout.total_seconds()}
    try:
        core, rank, world_size = _core.meet(url, settings)
    except _core.DrumlineError as error:
        raise as_dist_error(error) from None
    store = TorchStore(of_core(core), backend="mpi")
    _living[:] = [store]
    yield store, rank, world_size
    raise RuntimeError("ranks that MPI has started meet once")
