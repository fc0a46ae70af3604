"""Objects from rank to rank."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from ranks import run

import drumline
from drumline._arrays import OfArrays
from drumline._format import FormatError, decode, encode
from drumline._objects import _CALLS

PLAIN = [
    None, True, 0, -(10**40), 1.5, -0.0, math.inf, 2 - 3j, "ü", b"\0\xff", bytearray(b"a"), [], [1, [2]],
    (1, ("a",)), {1, 2}, frozenset("a"), {"a": 1, 2: [None], (1, 2): {}},
]  # fmt: skip


@pytest.mark.parametrize("value", PLAIN, ids=repr)
def test_plain_data_comes_back_as_it_went(value):
    back = decode(encode(value))
    assert back == value and type(back) is type(value) and repr(back) == repr(value)


def test_arrays_and_tensors_come_back():
    arrays = [np.arange(6).reshape(2, 3).T, np.zeros((0, 2), "f2"), np.array("text"), np.float32(2)]
    for array in arrays:
        back = decode(encode(array))
        assert type(back) is type(array) and back.dtype == array.dtype
        np.testing.assert_array_equal(back, array)
    assert math.isnan(decode(encode(math.nan)))
    torch = pytest.importorskip("torch")
    for tensor in (torch.ones(2, 3).bfloat16().t(), torch.tensor(True), torch.zeros(0, 4)):
        back = decode(encode({"state": [tensor]}))["state"][0]
        assert back.dtype == tensor.dtype and torch.equal(back, tensor)


class Evil:
    ran = False

    def __reduce__(self):
        return exec, ("from test_objects import Evil; Evil.ran = True",)


def test_nothing_is_executed_unless_it_is_asked_for():
    with pytest.raises(FormatError, match="Evil"):
        encode([Evil()])
    pickled = encode([Evil()], allow_pickle=True)
    with pytest.raises(FormatError, match="allow_pickle"):
        decode(pickled)
    assert not Evil.ran
    decode(pickled, allow_pickle=True)
    assert Evil.ran
    with pytest.raises(FormatError):
        encode(np.array([Evil()]))


def framed(tree):
    description = json.dumps(tree).encode()
    return len(description).to_bytes(8, "little") + description


@pytest.mark.parametrize(
    "data",
    [
        b"", b"\xff" * 8, framed(["bytes", 9]), framed(["bytes", -1]), framed(["none"]), framed([]),
        framed(["array", "O", [1], 0]), framed(["array", "f8", [7], 0]), framed(["int"]),
        framed(["int", []]), framed(["tensor", "load", [0], 0]), framed(["dict", [[["list", []], 1]]]),
        framed({"a": 1}), b"\x01" + bytes(7) + b"{", framed(["list"] * 3),
    ],
)  # fmt: skip
def test_bytes_that_describe_no_object_are_refused(data):
    with pytest.raises(ValueError):
        decode(data)


def every_call(rank, world_size, directory):
    drumline.init_process_group(f"file://{directory}/store", rank=rank, world_size=world_size)
    out = {}
    own = {"rank": rank, "data": np.full(rank, rank)}
    gathered = [None] * world_size
    assert drumline.all_gather_object(gathered, own) is gathered
    out["all_gather"] = [len(it["data"]) for it in gathered]
    at_two = drumline.gather_object("x" * rank, dst=2)
    out["gather"] = at_two
    objects = ["a", {"b": 1}] if rank == 1 else [None, None]
    out["broadcast"] = drumline.broadcast_object_list(objects, src=1)
    mine = [None]
    drumline.scatter_object_list(mine, [10, "b", None] if rank == 0 else None)
    out["scatter"] = mine[0]
    group = drumline._world.group_or_world(None)
    if rank == 0:
        group.send_object({"to": 1}, 1, tag=3)
    if rank == 1:
        out["received"] = group.recv_object(0, tag=3)
    with pytest.raises(ValueError, match="rank 1" if rank != 1 else "Evil"):
        drumline.all_gather_object(None, Evil() if rank == 1 else 7)
    with pytest.raises(ValueError, match="root"):
        drumline.broadcast_object_list([1], src=min(rank, 1))
    out["pickled"] = drumline.all_gather_object(None, range(rank), allow_pickle=True)
    drumline.destroy_process_group()
    return out


def test_objects_travel_and_the_group_survives_mistakes():
    for rank, out in enumerate(run(3, every_call)):
        assert out["all_gather"] == [0, 1, 2]
        assert out["gather"] == (["", "x", "xx"] if rank == 2 else None)
        assert out["broadcast"] == ["a", {"b": 1}]
        assert out["scatter"] == [10, "b", None][rank]
        assert out["pickled"] == [range(0), range(1), range(2)]
        if rank == 1:
            assert out["received"] == {"to": 1}


@pytest.mark.parametrize("extent", [2**44, -1, 0.5, True])
def test_a_tensor_is_as_large_as_its_bytes(extent):
    pytest.importorskip("torch")
    assert decode(framed(["tensor", "float32", [0, 4], 0])).shape == (0, 4)
    with pytest.raises(FormatError, match="shape"):
        decode(framed(["tensor", "float32", [extent], 0]))
    with pytest.raises(FormatError, match="shape"):
        decode(framed(["tensor", "float32", [extent, 0, 0.5], 0]))


def liar(rank, world_size, directory, lengths):
    """Rank 0 announces 3 bytes, and then those lengths for the objects of the ranks."""
    drumline.init_process_group(f"file://{directory}/store", rank=rank, world_size=world_size)
    group = drumline._world.group_or_world(None)
    if rank == 0:
        ours = np.array([_CALLS.index("scatter_object_list"), 0, 3], np.int64)
        group._gather_bytes(ours, [np.empty_like(ours) for _ in range(world_size)])
        group._group.broadcast(OfArrays().write(np.array(lengths, np.int64)), 0, False)
    else:
        with pytest.raises(ValueError, match="rank 0 announces 3 bytes"):
            group.scatter_object_list([None], None, 0)
    drumline.barrier()  # The group can be used further.
    drumline.destroy_process_group()


@pytest.mark.parametrize("lengths", [[0, 2**44], [4, -1], [2**63 - 1, 1]])
def test_a_rank_takes_no_memory_that_another_has_not_announced(lengths):
    run(2, liar, lengths)
