"""The direct API on arrays of numpy's."""

from __future__ import annotations

import numpy as np
import pytest
from ranks import run, run_and_see

import drumline


def connect(rank: int, world_size: int, directory: str) -> drumline.ProcessGroup:
    return drumline.init_process_group(f"file://{directory}/store", rank=rank, world_size=world_size)


TYPES = (
    "uint8 int8 uint16 int16 uint32 int32 uint64 int64 float16 float32 float64 complex64 complex128"
).split()


def sums(rank, world_size, directory):
    with connect(rank, world_size, directory) as group:
        results = {}
        for name in TYPES:
            data = np.arange(5).astype(name) + np.ones(5, name) * rank
            group.all_reduce(data)
            results[name] = data
        truth = np.array([rank == 0, True, False])
        group.all_reduce(truth, "band")
        return results, truth


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_type_is_summed(world_size):
    for results, truth in run(world_size, sums):
        for name, data in results.items():
            assert data.dtype == name
            expected = np.arange(5) * world_size + sum(range(world_size))
            np.testing.assert_array_equal(data, expected.astype(name))
        assert truth.tolist() == [world_size == 1, True, False]


def every_operation(rank, world_size, directory):
    with connect(rank, world_size, directory) as group:
        out = {}
        data = np.array([rank, 1.0])
        group.all_reduce(data, "avg")
        out["avg"] = data.tolist()
        data = np.array([rank, 1.0])
        group.all_reduce(data, ("premul_sum", rank + 1))
        out["premul_sum"] = data.tolist()
        data = np.array([rank + 1])
        group.reduce(data, 1, "max")
        out["reduce"] = data.tolist()
        data = np.array([rank + 1])
        group.broadcast(data, 2)
        out["broadcast"] = data.tolist()
        parts = [np.zeros(n + 1, int) for n in range(world_size)]
        group.all_gather(parts, np.full(rank + 1, rank))
        out["all_gather"] = [part.tolist() for part in parts]
        flat = np.zeros((world_size, 2))
        group.all_gather(flat, np.full(2, rank, float))
        out["all_gather flat"] = flat.tolist()
        parts = [np.zeros(1, int) for _ in range(world_size)] if rank == 1 else None
        group.gather(np.array([rank]), parts, 1)
        out["gather"] = parts and [part.tolist() for part in parts]
        parts = [np.zeros(n, int) for n in range(world_size)] if rank == 0 else None
        group.gather(np.full(rank, rank), parts, 0, counts=range(world_size))
        out["gather uneven"] = parts and [part.tolist() for part in parts]
        own = np.zeros(1, int)
        group.scatter(own, [np.array([10 * n]) for n in range(world_size)] if rank == 2 else None, 2)
        out["scatter"] = own.tolist()
        own = np.zeros(2, int)
        group.reduce_scatter(own, np.arange(2 * world_size) + rank)
        out["reduce_scatter"] = own.tolist()
        inputs = [np.full(rank + to, 10 * rank + to) for to in range(world_size)]
        outputs = [np.zeros(rank + at, int) for at in range(world_size)]
        group.all_to_all(outputs, inputs)
        out["all_to_all"] = [part.tolist() for part in outputs]
        after, before = (rank + 1) % world_size, (rank - 1) % world_size
        got = np.zeros(1, int)
        receives = group.irecv(got, before, 7)
        group.send(np.array([rank]), after, 7)
        assert receives.wait()
        out["message"] = got.tolist()
        if rank == 0:
            got = np.zeros(1, int)
            out["any"] = sorted((group.recv(got), got.item())[0] for _ in range(world_size - 1))
        else:
            group.send(np.array([rank]), 0)
            out["any"] = None
        group.barrier()
        group.monitored_barrier(60)
        column = np.arange(6.0).reshape(3, 2)
        group.all_reduce(column[:, 1], "max")
        out["column"] = column.tolist()
        work = group.all_reduce(column[::2], async_op=True)
        assert work.wait(60) and work.is_completed() and work.exception() is None
        out["rows"] = column.tolist()
        return out


def test_every_operation_does_what_it_says():
    first, second, third = run(3, every_operation)
    for rank, out in enumerate([first, second, third]):
        assert out["avg"] == [1.0, 1.0]
        assert out["premul_sum"] == [0 * 1 + 1 * 2 + 2 * 3, 6.0]
        assert out["reduce"] == [[1], [3], [3]][rank]
        assert out["broadcast"] == [3]
        assert out["all_gather"] == [[0], [1, 1], [2, 2, 2]]
        assert out["all_gather flat"] == [[0, 0], [1, 1], [2, 2]]
        assert out["gather"] == (rank == 1 and [[0], [1], [2]] or None)
        assert out["gather uneven"] == (rank == 0 and [[], [1], [2, 2]] or None)
        assert out["scatter"] == [10 * rank]
        assert out["reduce_scatter"] == [6 * rank + 3, 6 * rank + 6]
        assert out["all_to_all"] == [[10 * at + rank] * (rank + at) for at in range(3)]
        assert out["message"] == [(rank - 1) % 3]
        assert out["any"] == (rank == 0 and [1, 2] or None)
        assert out["column"] == [[0, 1], [2, 3], [4, 5]]
        assert out["rows"] == [[0, 3], [2, 3], [12, 15]]


def differing(rank, world_size, directory, what):
    group = connect(rank, world_size, directory)
    calls = {
        "type": lambda: group.all_reduce(np.zeros(4, [np.float32, np.int32][rank])),
        "length": lambda: group.all_reduce(np.zeros(4 + rank)),
        "operator": lambda: group.all_reduce(np.zeros(4), ["sum", "max"][rank]),
        "operation": lambda: [group.all_reduce, lambda it: group.broadcast(it, 0)][rank](np.zeros(4)),
        "root": lambda: group.reduce(np.zeros(4), rank),
    }
    calls[what]()
    group.destroy()


@pytest.mark.parametrize("what", ["type", "length", "operator", "operation", "root"])
def test_ranks_that_disagree_are_told_both_calls(what):
    for rank, (how, text) in enumerate(run_and_see(2, differing, what)):
        assert how == "raised", (rank, how, text)
        assert text.startswith("drumline.CollectiveMismatchError") and "rank" in text, text


def failed(rank, world_size, directory):
    group = connect(rank, world_size, directory)
    if rank == 1:
        group.abort()
    with pytest.raises(drumline.CollectiveError) as first:
        group.all_reduce(np.zeros(2))
    with pytest.raises(drumline.PoisonedError) as later:
        group.barrier()
    return [(it.value.cause, it.value.culprit) for it in (first, later)]


def test_errors_have_their_cause_and_the_rank_at_fault():
    assert run(2, failed) == [[("reported", 1)] * 2, [("aborted", 1)] * 2]
    assert (drumline.CollectiveError().cause, drumline.CollectiveError().culprit) == (None, None)


def refused(rank, world_size, directory):
    group = drumline.ProcessGroup.alone()
    wrong = {
        "no operator": lambda: group.all_reduce(np.zeros(2), "mean"),
        "no max": lambda: group.all_reduce(np.zeros(2, complex), "max"),
        "no factor": lambda: group.all_reduce(np.zeros(2), ("premul_sum",)),
        "below 0": lambda: group.isend(np.zeros(2), -1),
        "no such rank": lambda: group.broadcast(np.zeros(2), 7),
        "objects": lambda: group.all_reduce(np.array([object()])),
        "no array": lambda: group.all_reduce([1.0, 2.0]),
        "read-only": lambda: group.all_reduce(np.frombuffer(b"12345678", np.float64)),
        "byte order": lambda: group.all_reduce(np.zeros(2, ">f8")),
        "lengths": lambda: group.all_gather(np.zeros(3), np.zeros(2)),
        "types": lambda: group.all_gather(np.zeros(2, np.float32), np.zeros(2)),
        "time limit": lambda: group.set_timeout(-1),
    }
    texts = {}
    for name, call in wrong.items():
        with pytest.raises((ValueError, TypeError)) as raised:
            call()
        texts[name] = str(raised.value)
    data = np.array([3.0])
    group.all_reduce(data)  # it goes on
    group.destroy()
    with pytest.raises(ValueError, match="destroyed"):
        group.all_reduce(data)
    return texts


def test_wrong_arguments_are_refused_and_the_group_goes_on():
    [texts] = run(1, refused)
    assert "sum, avg" in texts["no operator"]
    assert "complex128" in texts["no max"]
    assert "rank 7" in texts["no such rank"]
    assert texts["lengths"].startswith("all_gather: "), texts


def test_what_is_written_while_it_is_read_is_copied_first():
    group = drumline.ProcessGroup.alone()
    both = np.arange(4.0)
    group.all_gather(both[1:3], both[:2])
    assert both.tolist() == [0, 0, 1, 3]


def test_bytearrays_and_tensors_of_others_are_arrays_too():
    group = drumline.ProcessGroup.alone()
    data = bytearray(b"abc")
    group.broadcast(data, 0)
    assert data == b"abc"
    torch = pytest.importorskip("torch")
    for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.bool):
        tensor = torch.ones(3, 2).to(dtype)
        group.all_reduce(tensor[:, 1])
        assert (tensor.float() == 1).all()


def metrics(rank, world_size, directory):
    with connect(rank, world_size, directory) as group:
        for _ in range(3):
            group.all_reduce(np.ones(5, np.float32))
        return drumline.metrics_text()


def test_calls_are_counted_for_prometheus():
    for rank, text in enumerate(run(2, metrics)):
        labels = f'group="world",rank="{rank}",operation="all_reduce"'
        assert f"drumline_calls_total{{{labels}}} 3\n" in text, text
        assert f"drumline_bytes_total{{{labels}}} 60\n" in text, text
        assert f'drumline_group_failed{{group="world",rank="{rank}"}} 0\n' in text, text
