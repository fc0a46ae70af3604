"""Key-value stores through which ranks find each other, with the methods of torch's.

>>> store = HashStore()
>>> store.set("key", "value")
>>> store.get("key")
b'value'
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from os import PathLike
from typing import Any

from drumline import _core

DEFAULT_TIMEOUT = timedelta(seconds=300)
DEFAULT_PORT = 29500

# More seconds than these are no limit, and a timedelta may not hold them.
_COUNTED_S = timedelta.max.total_seconds()

Value = str | bytes


class Store:
    """A small shared map from text to bytes, with waiting.

    Calls that wait raise StoreTimeoutError, which names the keys that are missing.

    A class of your own needs ``set``, ``get``, ``add`` and ``wait``, and is used wherever a store is. What
    it has besides (``compare_set``, ``check``, ``delete_key``) is used as well.
    """

    _inner: _core.Store

    def __getattr__(self, name: str) -> Any:
        # Of a subclass that keeps its keys elsewhere.
        if name == "_inner":
            raise NotImplementedError(f"{type(self).__name__} has no such method of its own")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def set(self, key: str, value: Value) -> None:
        """Sets ``key``. Callers that wait for it continue."""
        self._inner.set(key, _bytes(value))

    def get(self, key: str) -> bytes:
        """Waits until ``key`` exists, and returns its value."""
        return self._inner.get(key)

    def add(self, key: str, amount: int) -> int:
        """Adds to the decimal number under ``key`` (absent is 0) and returns the sum."""
        return self._inner.add(key, amount)

    def compare_set(self, key: str, expected_value: Value, desired_value: Value) -> bytes:
        """Replaces the value if it is the expected one; returns the value afterwards.

        An absent key is made if the expected value is empty.
        """
        return self._inner.compare_set(key, _bytes(expected_value), _bytes(desired_value))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Waits until all keys exist."""
        self._inner.wait(list(keys), _seconds(timeout))

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys exist now."""
        return self._inner.check(list(keys))

    def num_keys(self) -> int:
        """How many keys `list_keys` would list."""
        return self._inner.num_keys()

    def delete_key(self, key: str) -> bool:
        """Removes a key. Returns whether the store had it."""
        return self._inner.delete_key(key)

    def append(self, key: str, value: Value) -> None:
        """Appends ``value`` to that of ``key``. A missing key counts as empty.

        The method of torch's own stores in files appends nothing if ``key`` holds exactly ``value`` already. If
        processes share a file with torch's, give the key another value first.
        """
        self._inner.append(key, _bytes(value))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Waits until all keys exist, and returns their values."""
        return self._inner.multi_get(list(keys))

    def multi_set(self, keys: Sequence[str], values: Sequence[Value]) -> None:
        """Sets several keys."""
        self._inner.multi_set(list(keys), [_bytes(value) for value in values])

    def queue_push(self, key: str, value: Value) -> None:
        """Puts ``value`` at the end of the queue of ``key``."""
        self._inner.queue_push(key, _bytes(value))

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        """Takes the first item of a queue; every item goes to exactly one caller.

        Without ``block``, raises LookupError when the queue is empty.
        """
        item = self._inner.queue_pop(key, block)
        if item is None:
            raise LookupError(f"the queue {key!r} is empty")
        return item

    def queue_len(self, key: str) -> int:
        """The number of items in a queue."""
        return self._inner.queue_len(key)

    def list_keys(self) -> list[str]:
        """All keys that have a value, in order."""
        return self._inner.list_keys()

    def barrier(self, key: str, world_size: int, timeout: timedelta | None = None) -> None:
        """Waits until ``world_size`` callers have come. Every barrier needs a key of its own."""
        self._inner.barrier(key, world_size, _seconds(timeout))

    @property
    def timeout(self) -> timedelta:
        """The time limit of calls without one of their own."""
        limit = self._inner.timeout
        return timedelta(seconds=limit) if limit < _COUNTED_S else timedelta.max

    def set_timeout(self, timeout: timedelta) -> None:
        """Sets `timeout`, for this handle."""
        self._inner.set_timeout(timeout.total_seconds())

    def clone(self) -> Store:
        """Another handle for the same keys."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__, _inner=self._inner.clone())
        return other

    def has_extended_api(self) -> bool:
        """Whether the store has `append`, `multi_get` and `multi_set`: always."""
        return True


class HashStore(Store):
    """For threads of one process."""

    def __init__(self) -> None:
        self._inner = _core.Store.hash()


class FileStore(Store):
    """For processes that see one file, torch's among them.

    The last of ``world_size`` processes to close it deletes the file. Without, it stays.
    """

    def __init__(self, file_name: str | PathLike[str], world_size: int = -1) -> None:
        self.path = str(file_name)
        self._inner = _core.Store.file(file_name, max(world_size, 0))


class PrefixStore(Store):
    """The keys of another store (drumline's or torch's) that begin with ``prefix/``."""

    def __init__(self, prefix: str, store: object) -> None:
        self.prefix, self.underlying_store = prefix, store
        self._inner = _core.Store.prefix(prefix, core_of(store))


class TCPStore(Store):
    """For processes on any hosts; torch's may be the other end.

    The protocol has no secret. So a master listens on loopback only, and a client on loopback calls only ports
    that its own user or root holds. With ``exposed=True`` a master listens on any address, and trusts every
    client that reaches the port; a client trusts whoever holds the port. Port 0 means any free port; see `port`.
    """

    def __init__(
        self,
        host_name: str,
        port: int = DEFAULT_PORT,
        world_size: int | None = None,
        is_master: bool = False,
        timeout: timedelta = DEFAULT_TIMEOUT,
        wait_for_workers: bool = True,
        *,
        exposed: bool = False,
    ) -> None:
        self.host = host_name
        workers = world_size if wait_for_workers else None
        limit = timeout.total_seconds()
        self._inner = _core.Store.tcp(host_name, port, is_master, limit, workers, exposed)
        address = self._inner.address
        self.port = address[1] if address is not None else port


def of_core(inner: _core.Store) -> Store:
    """The store around one that the core has made."""
    store = object.__new__(Store)
    store._inner = inner
    return store


def core_of(store: object) -> object:
    """The store as the core takes it: its own, or any object with torch's methods.

    A subclass that has changed methods is such an object, so that the core calls them.
    """
    is_ours = isinstance(store, Store) and not any(
        getattr(type(store), name) is not getattr(Store, name) for name in _METHODS
    )
    return store._inner if is_ours else store  # type: ignore[attr-defined]


_METHODS = [name for name, it in vars(Store).items() if callable(it) and not name.startswith("_")]


def _bytes(value: Value) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


def _seconds(timeout: timedelta | None) -> float | None:
    return None if timeout is None else timeout.total_seconds()
