"""Objects that another rank has described: any bytes are an object or a FormatError, in bounded memory."""

from __future__ import annotations

import random
import tracemalloc
from typing import Any

import numpy as np
import pytest

from drumline._format import FormatError, decode, encode

MUTATIONS = 4_000
BYTES_MAX = 1 << 14

# What a decoder may take for every byte of its input, and whatever that is.
MEMORY_PER_BYTE = 200
MEMORY_FIXED = 64 << 10

OBJECTS: list[Any] = [
    None,
    {"loss": 0.25, "steps": [1, -(10**30)], ("a", 2): {"x", "y"}},
    [b"bytes", bytearray(b"more"), "text", frozenset({1}), 1 + 2j, float("inf"), True],
    {"array": np.arange(6, dtype=np.float32).reshape(2, 3), "scalar": np.int16(-3)},
    [np.zeros((0, 4)), np.array(["ab", "c"]), np.array(b"raw")],
]


def torch_objects() -> list[Any]:
    try:
        import torch
    except ImportError:
        return []
    return [{"weight": torch.ones(2, 3), "none": torch.empty(0, dtype=torch.int64)}]


# Made here, before memory is counted: that of torch's import is not meant.
RECORDED = [encode(value) for value in OBJECTS + torch_objects()]


def mutated(data: bytes, other: bytes, rng: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(changed)) if changed else 0
        kind = rng.randrange(7)
        if kind == 0 and changed:
            changed[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            changed[at : at + rng.randint(1, 9)] = b""
        elif kind == 2:
            changed[at:at] = changed[at : at + rng.randint(1, 32)]
        elif kind == 3:
            del changed[at:]
            changed += other[rng.randrange(len(other) + 1) :]
        elif kind == 4:
            changed[at : at + 8] = rng.choice([0, 1, len(data), 2**31, 2**63, 2**64 - 1]).to_bytes(8, "little")
        elif kind == 5:
            # A number of the description.
            digits = [i for i, byte in enumerate(changed) if 48 <= byte < 58]
            if digits:
                at = rng.choice(digits)
                changed[at : at + 1] = rng.choice([b"-1", b"9" * rng.randint(1, 30), b"1e300", b"null"])
        else:
            # A tag or the name of a type.
            words = [b"tensor", b"array", b"scalar", b"pickle", b"int", b"float32", b"<f8", b"O", b"S999999999"]
            changed[at:at] = rng.choice(words)
    return rebuilt(bytes(changed[:BYTES_MAX]), rng)


def rebuilt(data: bytes, rng: random.Random) -> bytes:
    """Half of the time the length in front is right again, so that the description is looked at."""
    end = data.rfind(b"]")
    if rng.random() < 0.5 or end < 8:
        return data
    return (end + 1 - 8).to_bytes(8, "little") + data[8:]


def read(data: bytes) -> bool:
    """Whether the bytes are an object. Raises what a rank must not see."""
    tracemalloc.reset_peak()
    before, _ = tracemalloc.get_traced_memory()
    try:
        value = decode(data)
    except FormatError:
        return False
    finally:
        taken = tracemalloc.get_traced_memory()[1] - before
        assert taken <= MEMORY_FIXED + MEMORY_PER_BYTE * len(data), (taken, len(data))
    # Not the same bytes: sets have no order, and numbers several spellings.
    again = encode(value)
    assert len(again) <= MEMORY_FIXED + MEMORY_PER_BYTE * len(data)
    assert len(encode(decode(again))) == len(again)
    return True


@pytest.fixture(autouse=True)
def traced() -> Any:
    tracemalloc.start()
    yield
    tracemalloc.stop()


def test_any_bytes_are_an_object_or_an_error() -> None:
    rng = random.Random(1)
    for data in RECORDED:
        assert read(data)
    taken = 0
    for number in range(MUTATIONS):
        data = mutated(rng.choice(RECORDED), rng.choice(RECORDED), rng)
        try:
            taken += read(data)
        except Exception as error:
            raise AssertionError(f"input {number}: {data!r}") from error
    assert 0 < taken < MUTATIONS


@pytest.mark.parametrize(
    "description",
    [
        b'["int",1]',
        b'["int","x"]',
        b'["float","x"]',
        b'["array","<f4",[3],5]',
        b'["array","no type",[3],4]',
        b'["list",[["list",[1]]]]',
        b"[" * 100_000,
        b"not json",
        b'["set",[["list",[]]]]',
        b'["bytes",1e300]',
        b"1" * 10_000,
    ],
)
def test_what_describes_nothing_is_a_format_error(description: bytes) -> None:
    with pytest.raises(FormatError):
        decode(len(description).to_bytes(8, "little") + description + bytes(4))
