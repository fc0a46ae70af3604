"""The core's AsyncReduce, and its memory as tensors."""

from __future__ import annotations

import gc

import pytest
from ranks import run

torch = pytest.importorskip("torch")

import drumline  # noqa: E402
from drumline import _core  # noqa: E402
from drumline._registered import storage_of  # noqa: E402
from drumline.ddp.buckets import tensor_at  # noqa: E402

CODES = dict(_core.DTYPES)
TYPES = {
    "a": (torch.float32, "f32"),
    "b": (torch.float64, "f64"),
    "c": (torch.float16, "f16"),
    "d": (torch.bfloat16, "bf16"),
}


def connect(rank, world_size, directory):
    store = drumline.FileStore(f"{directory}/store", world_size)
    return drumline.init_process_group(store=store, rank=rank, world_size=world_size)


def engine_of(group, length=100):
    tensors = [(name, length, CODES[code]) for name, (_, code) in TYPES.items()]
    return _core.AsyncReduce(group._group, tensors)


def tensors_of(engine, length=100):
    storage = storage_of(engine)
    return {
        name: tensor_at(storage, engine.offset(name), dtype, torch.empty(length))
        for name, (dtype, _) in TYPES.items()
    }


def averages(rank, world_size, directory):
    with connect(rank, world_size, directory) as group:
        engine = engine_of(group)
        tensors = tensors_of(engine)
        seen = []
        for step in range(3):
            for name in sorted(tensors, reverse=rank == 1):
                tensors[name].fill_(rank + step)
                engine.async_reduce(name)
            engine.synchronize()
            seen.append([tensor.unique().tolist() for tensor in tensors.values()])
        steps = engine.counts()[0]
        engine.leave(5.0)
        return seen, steps


def test_tensors_of_four_types_are_averaged_in_place():
    for seen, steps in run(2, averages):
        assert seen == [[[0.5 + step]] * 4 for step in range(3)]
        assert steps == 3


def outlives(rank, world_size, directory):
    with connect(rank, world_size, directory) as group:
        engine = engine_of(group)
        tensors = tensors_of(engine)
        for name, tensor in tensors.items():
            tensor.fill_(rank)
            engine.async_reduce(name)
        engine.synchronize()
        with pytest.raises(ValueError, match="no tensor `nobody`"):
            engine.async_reduce("nobody")
        engine.leave(5.0)
        with pytest.raises(ValueError, match="stopped"):
            engine.async_reduce("a")
        kept = tensors["b"]
        address = kept.data_ptr()
        del engine, tensors
        gc.collect()
        # Its memory is not given to anybody else.
        other = engine_of(group)
        others = tensors_of(other)
        for tensor in others.values():
            tensor.fill_(7)
        other.leave(5.0)
        return kept.tolist(), kept.data_ptr() == address, not any(
            tensor.data_ptr() == address for tensor in others.values()
        )


def test_tensors_outlive_the_engine():
    assert run(2, outlives) == [([0.5] * 100, True, True)] * 2


def forgotten(rank, world_size, directory):
    with connect(rank, world_size, directory) as group:
        engine = engine_of(group)
        for name in "abcd" if rank == 0 else "abd":
            engine.async_reduce(name)
        with pytest.raises(_core.NotBroughtError) as raised:
            engine.synchronize()
        engine.sync_grad()  # the next step is whole
        engine.leave(5.0)
        return str(raised.value)


def test_what_was_not_brought_is_named_on_all_ranks():
    for text in run(2, forgotten):
        assert "step 1: rank 1 has not brought `c`" in text


def differ(rank, world_size, directory):
    with connect(rank, world_size, directory) as group:
        with pytest.raises(_core.DrumlineError) as raised:
            engine_of(group, length=100 + rank)
        return str(raised.value)


def test_other_lengths_are_named_on_all_ranks():
    for text in run(2, differ):
        assert "`a`" in text and "rank 1" in text and "101" in text
