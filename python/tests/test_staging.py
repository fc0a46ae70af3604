"""Tensors of a GPU are copied in the order of the caller's stream.

There is no GPU here. Tensors of torch's device ``meta``, which have no memory, stand for a GPU's; their
contents lie elsewhere, and streams do nothing before somebody waits for them. Whoever forgets to wait
sees what is not there yet.
"""

from __future__ import annotations

import warnings

import pytest
from ranks import run
from torch_versions import TELLS_WHO_WAITS, needs_backends

torch = pytest.importorskip("torch")
import torch._C._distributed_c10d as c10d  # noqa: E402
import torch.distributed as dist  # noqa: E402

from drumline.torch import device, tensors  # noqa: E402


class Stream:
    """Does what it was told to when somebody waits for it, in order."""

    def __init__(self):
        self.told, self.done = [], 0

    def tell(self, action):
        self.told.append(action)

    def run(self, count):
        while self.done < count:
            self.done += 1
            self.told[self.done - 1]()

    def wait_stream(self, other):
        count = len(other.told)
        self.tell(lambda: other.run(count))

    def synchronize(self):
        self.run(len(self.told))


class Simulated:
    """An accelerator with such streams."""

    def __init__(self):
        self.current, self.contents = Stream(), {}

    def tensor(self, *shape):
        tensor = torch.empty(shape, device="meta")
        self.contents[id(tensor)] = torch.full(shape, torch.nan)
        return tensor

    def elements(self, tensor):
        return self.contents[id(tensor)] if tensor.device.type == "meta" else tensor

    def current_stream(self, _):
        return self.current

    def new_stream(self, _):
        return Stream()

    def pinned_like(self, tensor):
        return torch.full(tensor.shape, torch.nan, dtype=tensor.dtype)

    def copy(self, to, source, stream):
        stream.tell(lambda: self.elements(to).copy_(self.elements(source)))


def staged(rank, world_size, directory):
    gpu = Simulated()
    side = device.SideStream(torch.device("meta"), gpu)
    tensors.side_stream = lambda _: side
    store = dist.FileStore(f"{directory}/store", world_size)
    dist.init_process_group("drumline", store=store, rank=rank, world_size=world_size)
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    seen = {}
    for is_async in (False, True):
        data, parts = gpu.tensor(4), [gpu.tensor(2) for _ in range(world_size)]
        reduced, gathered = c10d.AllreduceOptions(), c10d.AllgatherOptions()
        gathered.asyncOp = is_async
        if TELLS_WHO_WAITS:
            reduced.asyncOp = is_async
        # The kernels that make the tensors are queued, and have not run.
        gpu.current.tell(lambda it=gpu.elements(data): it.fill_(rank + 1))
        works = [backend.allreduce([data], reduced)]
        own = gpu.tensor(2)
        gpu.current.tell(lambda it=gpu.elements(own): it.fill_(10 * rank))
        works.append(backend.allgather([parts], [own], gathered))
        if is_async or not TELLS_WHO_WAITS:
            for work in works:
                work.wait()
        # So are those that use the results; only the stream itself waits for them.
        used = []
        for tensor in (data, *parts):
            gpu.current.tell(lambda it=gpu.elements(tensor): used.append(it.tolist()))
        assert used == []
        gpu.current.synchronize()
        seen[is_async] = used
    dist.destroy_process_group()
    return seen


@needs_backends
def test_kernels_before_and_after_an_operation_keep_their_order():
    expected = [[3] * 4, [0] * 2, [10] * 2]
    assert run(2, staged) == [{False: expected, True: expected}] * 2


def test_a_device_that_was_not_tried_is_told_of_once(monkeypatch):
    monkeypatch.setattr(device, "OfTorch", Simulated)
    device.side_stream.cache_clear()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(3):
            device.side_stream(torch.device("cuda", 0))
    device.side_stream.cache_clear()
    [warning] = told
    assert "cuda:0" in str(warning.message) and "not been verified" in str(warning.message)


def test_tensors_whose_memory_has_other_numbers_are_copied():
    number = torch.tensor([1 + 2j])
    plain, off_by_four = torch.ones(4), torch.ones(5)[1:]
    for tensor in (plain, off_by_four, number):
        assert tensors.Staging().write(tensor)[0] == tensor.data_ptr()
    views = number.conj().imag, torch._neg_view(torch.ones(4)), number.conj()
    assert all(view.is_contiguous() for view in views)
    for tensor in (*views, torch.ones(4)[::2]):
        staging, before = tensors.Staging(), tensor.tolist()
        assert staging.read(tensor)[0] != tensor.data_ptr()
        *_, copy = staging.write(tensor)
        assert copy.tolist() == before
        copy.mul_(2)
        staging.finish()
        assert tensor.tolist() == [2 * it for it in before]
