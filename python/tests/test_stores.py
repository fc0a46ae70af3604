"""Stores: drumline's with torch's methods, and torch's as the place where drumline's groups meet."""

from __future__ import annotations

import os
import threading
import time
from datetime import timedelta

import numpy as np
import pytest
from ranks import run

import drumline
from drumline import _core
from drumline.groups import ProcessGroup

SOON = timedelta(milliseconds=50)


def own_stores(directory):
    master = drumline.TCPStore("127.0.0.1", 0, is_master=True)
    return {
        "hash": (drumline.HashStore(),) * 2,
        "file": tuple(drumline.FileStore(directory / "file", 2) for _ in range(2)),
        "tcp": (master, drumline.TCPStore("127.0.0.1", master.port)),
        "prefix": (drumline.PrefixStore("a", master), drumline.PrefixStore("a", master)),
    }


@pytest.mark.parametrize("kind", ["hash", "file", "tcp", "prefix"])
def test_stores_do_what_torchs_do(kind, tmp_path):
    one, other = own_stores(tmp_path)[kind]
    one.set("key", "value")
    assert other.get("key") == b"value"
    assert (other.add("n", 5), one.add("n", -2)) == (5, 3)
    assert one.compare_set("leader", "", "me") == b"me" == other.compare_set("leader", b"", b"you")
    assert one.check(["key", "n"]) and not one.check(["key", "none"])
    with pytest.raises(drumline.StoreTimeoutError, match="none"):
        one.wait(["key", "none"], SOON)
    one.append("key", "s")
    one.multi_set(["x", "y"], ["1", b"2"])
    assert other.multi_get(["y", "x", "key"]) == [b"2", b"1", b"values"]
    assert other.delete_key("x") and not other.delete_key("x")
    assert one.list_keys() == ["key", "leader", "n", "y"] and one.num_keys() == 4
    later = threading.Timer(0.1, lambda: other.set("later", b"!"))
    later.start()
    one.wait(["later"], timedelta(seconds=60))
    later.join()
    impatient = one.clone()
    impatient.set_timeout(SOON)
    assert impatient.timeout == SOON
    with pytest.raises(drumline.StoreTimeoutError):
        impatient.get("none")
    if kind != "file":
        one.queue_push("work", "a")
        assert (other.queue_len("work"), other.queue_pop("work")) == (1, b"a")
        with pytest.raises(LookupError):
            other.queue_pop("work", block=False)


def through(rank, world_size, directory, kind, port):
    if "torch" in kind:
        import torch.distributed as dist
    store = {
        "torch file": lambda: dist.FileStore(f"{directory}/s", world_size),
        "torch prefix": lambda: dist.PrefixStore("p", dist.FileStore(f"{directory}/s", world_size)),
        "torch tcp": lambda: dist.TCPStore("127.0.0.1", port, is_master=False),
        "file": lambda: drumline.FileStore(f"{directory}/s", world_size),
        "tcp": lambda: drumline.TCPStore("127.0.0.1", port),
        "python": lambda: OnlyTheNeedful(drumline.FileStore(f"{directory}/s", world_size)),
    }[kind]()
    sums = []
    # Again, in the same store. One that cannot delete keys serves one group of a name.
    for _ in range(1 if kind == "python" else 2):
        with drumline.init_process_group(store=store, rank=rank, world_size=world_size) as group:
            data = np.array([rank + 1])
            group.all_reduce(data)
            sums.append(data.item())
    return sums


class OnlyTheNeedful:
    """A foreign store with only the methods that drumline needs."""

    def __init__(self, store):
        self._store = store

    def set(self, key, value):
        self._store.set(key, value)

    def get(self, key):
        return self._store.get(key)

    def add(self, key, amount):
        return self._store.add(key, amount)

    def wait(self, keys, timeout):
        self._store.wait(keys, timeout)


class BothLookFirst(OnlyTheNeedful):
    """A store in which two callers have both looked for a key before either continues."""

    def __init__(self, store):
        super().__init__(store)
        self._both = threading.Barrier(2)

    def wait(self, keys, timeout):
        try:
            super().wait(keys, timeout)
        finally:
            self._both.wait(60)


def test_two_that_make_a_key_agree_on_it_though_the_store_cannot_compare():
    store = BothLookFirst(drumline.HashStore())
    for turn in range(5):
        agreed = []

        def make(value, key=f"leader {turn}", agreed=agreed):
            agreed.append(drumline.PrefixStore("a", store).compare_set(key, "", value))

        threads = [threading.Thread(target=make, args=(value,)) for value in "xy"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert agreed in ([b"x"] * 2, [b"y"] * 2), agreed


@pytest.mark.parametrize(
    "kind", ["torch file", "torch prefix", "torch tcp", "file", "tcp", "python"]
)
def test_groups_meet_in_any_store(kind):
    if "torch" in kind:
        pytest.importorskip("torch")
    master = drumline.TCPStore("127.0.0.1", 0, is_master=True)
    assert run(2, through, kind, master.port) == [[3] * (1 if kind == "python" else 2)] * 2


def test_a_store_in_the_process_serves_threads():
    store, sums = drumline.HashStore(), {}

    def rank(number):
        group = ProcessGroup(
            _core.Group.connect("threads", store._inner, number, [0, 1])
        )
        data = np.array([number + 1.0])
        group.all_reduce(data)
        group.destroy()
        sums[number] = data.item()

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sums == {0: 3.0, 1: 3.0}


def gloo_in_our_store(rank, world_size, directory, port):
    torch = pytest.importorskip("torch")
    from drumline.torch.store import TorchStore

    store = TorchStore(drumline.TCPStore("127.0.0.1", port))
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    tensor = torch.ones(1)
    torch.distributed.all_reduce(tensor)
    torch.distributed.destroy_process_group()
    with pytest.raises(torch.distributed.DistStoreError, match="none"):
        store.wait(["none"], SOON)
    return tensor.item()


def test_torch_meets_in_our_store(monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    master = drumline.TCPStore("127.0.0.1", 0, is_master=True)
    assert run(2, gloo_in_our_store, master.port) == [2, 2]


def test_a_file_store_needs_no_number_of_processes_and_then_stays(tmp_path):
    path = tmp_path / "file"
    for arguments in ((), (-1,)):
        store = drumline.FileStore(path, *arguments)
        store.set("key", "value")
        del store
        assert path.exists()
    assert drumline.FileStore(path).get("key") == b"value"


class OfMyOwn(drumline.Store):
    """A store in files of its own. It has no more than a store must have."""

    def __init__(self, directory):
        self.directory, self.calls = directory, set()

    def _path(self, key):
        return f"{self.directory}/{key.replace('/', '-')}"

    def set(self, key, value):
        self.calls.add("set")
        with open(self._path(key) + ".new", "wb") as file:
            file.write(value.encode() if isinstance(value, str) else value)
        os.rename(self._path(key) + ".new", self._path(key))

    def get(self, key):
        self.wait([key])
        with open(self._path(key), "rb") as file:
            return file.read()

    def add(self, key, amount):
        import fcntl

        with open(self._path(key), "a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            total = int(file.read() or b"0") + amount
            file.truncate(0)
            file.write(str(total).encode())
        return total

    def wait(self, keys, timeout=timedelta(seconds=60)):
        until = time.monotonic() + timeout.total_seconds()
        while not all(os.path.exists(self._path(key)) for key in keys):
            if time.monotonic() > until:
                raise drumline.StoreTimeoutError(f"no {keys}")
            time.sleep(0.01)


class Counting(drumline.HashStore):
    """A store of drumline's with a method that was changed."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def set(self, key, value):
        self.count += 1
        super().set(key, value)


def meet_in_a_store_of_my_own(rank, world_size, directory):
    store = OfMyOwn(directory)
    group = drumline.init_process_group(store=store, rank=rank, world_size=world_size)
    data = np.array([rank + 1])
    group.all_reduce(data)
    drumline.destroy_process_group()
    with pytest.raises(NotImplementedError, match="OfMyOwn has no such method"):
        store.queue_len("key")
    assert "set" in store.calls
    prefixed = drumline.PrefixStore("mine", store)
    prefixed.set(f"key{rank}", "value")
    return data.item(), store.get(f"mine/key{rank}")


def test_a_subclass_of_store_is_a_store():
    assert run(2, meet_in_a_store_of_my_own) == [(3, b"value")] * 2


def test_methods_that_a_subclass_changes_are_called():
    store = Counting()
    before = store.count
    drumline.PrefixStore("p", store).set("key", "value")
    assert store.count == before + 1 and store.get("p/key") == b"value"
