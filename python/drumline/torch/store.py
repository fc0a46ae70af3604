"""drumline's stores as torch stores.

>>> dist.init_process_group("gloo", store=TorchStore(store), rank=0, world_size=1)  # doctest: +SKIP
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from drumline import _core
from drumline.stores import Store, Value


class TorchStore(dist.Store):
    """A drumline store as a torch store. Groups that are made with it are on ``backend``, if it has one."""

    def __init__(self, store: Store, backend: str | None = None) -> None:
        super().__init__()
        self._store, self.backend = store, backend

    def set(self, key: str, value: Value) -> None:
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        return _as_torch(lambda: self._store.get(key))

    def add(self, key: str, value: int) -> int:
        return self._store.add(key, value)

    def compare_set(self, key: str, expected_value: Value, desired_value: Value) -> bytes:
        return self._store.compare_set(key, expected_value, desired_value)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        _as_torch(lambda: self._store.wait(keys, timeout))

    def check(self, keys: Sequence[str]) -> bool:
        return self._store.check(keys)

    def num_keys(self) -> int:
        return self._store.num_keys()

    def delete_key(self, key: str) -> bool:
        return self._store.delete_key(key)

    def append(self, key: str, value: Value) -> None:
        self._store.append(key, value)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return _as_torch(lambda: self._store.multi_get(keys))

    def multi_set(self, keys: Sequence[str], values: Sequence[Value]) -> None:
        self._store.multi_set(keys, values)

    def queue_push(self, key: str, value: Value) -> None:
        self._store.queue_push(key, value)

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        try:
            return _as_torch(lambda: self._store.queue_pop(key, block))
        except LookupError as error:
            raise dist.QueueEmptyError(str(error)) from None

    def queue_len(self, key: str) -> int:
        return self._store.queue_len(key)

    def list_keys(self) -> list[str]:
        return self._store.list_keys()

    def barrier(self, key: str, world_size: int, timeout: timedelta | None = None) -> None:
        _as_torch(lambda: self._store.barrier(key, world_size, timeout))

    def set_timeout(self, timeout: timedelta) -> None:
        self._store.set_timeout(timeout)

    @property
    def timeout(self) -> timedelta:
        return self._store.timeout

    def clone(self) -> TorchStore:
        return TorchStore(self._store.clone(), self.backend)

    def has_extended_api(self) -> bool:
        return True


def _as_torch(call: Any) -> Any:
    try:
        return call()
    except _core.StoreError as error:
        raise dist.DistStoreError(str(error)) from None


def master_of(store: dist.Store) -> tuple[str, int] | None:
    """Host and port of the store, if it has one: the route there leads to the other hosts."""
    store = _innermost(store)
    if isinstance(store, dist.TCPStore):
        return store.host, store.port
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT", "")
    return (address, int(port)) if address and port.isdigit() else None


def backend_of(store: dist.Store) -> str | None:
    """What carries groups that are made with this store: that of the environment, or else the store's own."""
    if os.environ.get("DRUMLINE_BACKEND"):
        return None
    return getattr(_innermost(store), "backend", None)


def _innermost(store: dist.Store) -> dist.Store:
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store
