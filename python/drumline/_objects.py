"""Collectives and messages of Python objects."""

from __future__ import annotations

from typing import Any

import numpy as np

from drumline._arrays import OfArrays
from drumline._format import FormatError, decode, encode
from drumline._ranks import Ranks

_FAILED = -1
_CALLS = ["all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list"]


class Objects(Ranks):
    """Collectives and messages of Python objects.

    Plain data, numpy arrays and torch tensors, in lists, tuples, sets and dicts, travel without running
    code. Other objects are pickled if all ranks pass ``allow_pickle=True``. A rank that can send pickled
    bytes can run any code on the receiver.

    If the object of a rank cannot travel, or a rank makes another call, all ranks raise a ValueError that
    names the rank. The group can be used further.
    """

    def all_gather_object(
        self, object_list: list[Any] | None, obj: Any, *, allow_pickle: bool = False
    ) -> list[Any]:
        """Gathers the ``obj`` of all ranks into ``object_list``, if given. Returns the list."""
        own = _encoded(obj, allow_pickle)
        lengths = self._agree("all_gather_object", 0, own)
        parts = [np.empty(length, np.uint8) for length in lengths]
        self._gather_bytes(_bytes(own), parts)
        return _fill(object_list, [decode(part.tobytes(), allow_pickle) for part in parts])

    def gather_object(
        self,
        obj: Any,
        object_gather_list: list[Any] | None = None,
        group_dst: int = 0,
        *,
        allow_pickle: bool = False,
    ) -> list[Any] | None:
        """Gathers the ``obj`` of all ranks on rank ``group_dst``. Returns the list there."""
        own, root = _encoded(obj, allow_pickle), self._checked(group_dst)
        lengths = self._agree("gather_object", root, own)
        at_root = self._group.rank == root
        parts = [np.empty(length, np.uint8) for length in lengths] if at_root else []
        staging = OfArrays()
        filled = [staging.write(part) for part in parts]
        self._group.gather(staging.read(_bytes(own)), filled, root, lengths, False)
        if not at_root:
            return None
        return _fill(object_gather_list, [decode(it.tobytes(), allow_pickle) for it in parts])

    def broadcast_object_list(
        self, object_list: list[Any], group_src: int = 0, *, allow_pickle: bool = False
    ) -> list[Any]:
        """Replaces the objects of the list by those of rank ``group_src``. Returns the list."""
        root = self._checked(group_src)
        at_root = self._group.rank == root
        own = _encoded(list(object_list), allow_pickle) if at_root else b""
        lengths = self._agree("broadcast_object_list", root, own)
        data = np.empty(lengths[root], np.uint8)
        if at_root:
            data[:] = _bytes(own)
        self._group.broadcast(OfArrays().write(data), root, False)
        theirs = decode(data.tobytes(), allow_pickle)
        if len(theirs) != len(object_list):
            raise ValueError(
                f"broadcast_object_list: {self._who(root)} passes {len(theirs)} objects, this rank a list "
                f"of {len(object_list)}"
            )
        if not at_root:
            object_list[:] = theirs
        return object_list

    def scatter_object_list(
        self,
        scatter_object_output_list: list[Any] | None,
        scatter_object_input_list: list[Any] | None = None,
        group_src: int = 0,
        *,
        allow_pickle: bool = False,
    ) -> Any:
        """Gives rank ``i`` object ``i`` of the list of rank ``group_src``. Returns it, and puts it first
        in the output list."""
        rank, size, root = self._group.rank, self._group.world_size, self._checked(group_src)
        at_root = rank == root
        parts: list[bytes] | FormatError = []
        if at_root:
            objects = list(scatter_object_input_list or [])
            encoded = [_encoded(obj, allow_pickle) for obj in objects]
            wrong = next((it for it in encoded if isinstance(it, FormatError)), None)
            if len(objects) != size:
                wrong = FormatError(f"the list has {len(objects)} objects for {size} ranks")
            parts = wrong or [it for it in encoded if isinstance(it, bytes)]
        total = parts if isinstance(parts, FormatError) else b"".join(parts)
        announced = self._agree("scatter_object_list", root, total)[root]
        lengths = np.zeros(size, np.int64)
        if at_root and not isinstance(parts, FormatError):
            lengths[:] = [len(part) for part in parts]
        self._group.broadcast(OfArrays().write(lengths), root, False)
        each = [int(length) for length in lengths]
        if min(each) < 0 or sum(each) != announced:
            raise ValueError(
                f"scatter_object_list: {self._who(root)} announces {announced} bytes, and then objects of "
                f"{min(each)} to {max(each)} bytes that do not make them"
            )
        own = np.empty(each[rank], np.uint8)
        staging = OfArrays()
        read = [staging.read(_bytes(part)) for part in parts] if at_root else []  # type: ignore[union-attr]
        self._group.scatter(read, staging.write(own), root, each, False)
        obj = decode(own.tobytes(), allow_pickle)
        if scatter_object_output_list:
            scatter_object_output_list[0] = obj
        return obj

    def send_object(
        self, obj: Any, group_dst: int, tag: int = 0, *, allow_pickle: bool = False
    ) -> None:
        """Sends an object to rank ``group_dst``."""
        data, to = _bytes(encode(obj, allow_pickle)), self._checked(group_dst)
        self._check_length("send_object", self._group.rank, data.size)
        staging = OfArrays()
        self._group.send(staging.read(np.array([data.size])), to, tag).wait()
        self._group.send(staging.read(data), to, tag).wait()

    def recv_object(self, group_src: int, tag: int = 0, *, allow_pickle: bool = False) -> Any:
        """Receives what rank ``group_src`` sends by `send_object` with the same tag."""
        staging, length, src = OfArrays(), np.zeros(1, np.int64), self._checked(group_src)
        self._group.recv(staging.write(length), src, tag).wait()
        self._check_length("recv_object", src, int(length[0]))
        data = np.empty(int(length[0]), np.uint8)
        self._group.recv(staging.write(data), src, tag).wait()
        return decode(data.tobytes(), allow_pickle)

    def _agree(self, call: str, root: int, own: bytes | FormatError) -> list[int]:
        """Compares the calls of all ranks. Returns the lengths of their objects, in bytes."""
        group = self._group
        length = _FAILED if isinstance(own, FormatError) else len(own)
        ours = np.array([_CALLS.index(call), root, length], np.int64)
        everybody = [np.empty_like(ours) for _ in range(group.world_size)]
        self._gather_bytes(ours, everybody)
        if isinstance(own, FormatError):
            raise ValueError(f"{call}: {own}") from None
        for rank, (code, at, length) in enumerate(everybody):
            if (code, at) != (ours[0], root):
                theirs = _CALLS[code] if 0 <= code < len(_CALLS) else "something else"
                raise ValueError(
                    f"{call}: {self._who(rank)} called {theirs} (root: {self._who(at)}) where this rank called "
                    f"{call} (root: {self._who(root)})"
                )
            if length == _FAILED:
                raise ValueError(
                    f"{call}: {self._who(rank)} could not describe its object; its own error says why"
                )
            self._check_length(call, rank, int(length))
        return [int(theirs[2]) for theirs in everybody]

    def _check_length(self, call: str, rank: int, length: int) -> None:
        limit = self._group.object_bytes_max
        if not 0 <= length <= limit:
            raise ValueError(
                f"{call}: the object of {self._who(rank)} takes {length} bytes, and at most {limit} are "
                "allowed (DRUMLINE_OBJECT_BYTES_MAX)"
            )

    def _gather_bytes(self, own: Any, parts: list[Any]) -> None:
        staging = OfArrays()
        self._group.all_gather(staging.read(own), [staging.write(part) for part in parts], False)


def _encoded(obj: Any, allow_pickle: bool) -> bytes | FormatError:
    try:
        return encode(obj, allow_pickle)
    except FormatError as error:
        return error
    except Exception as error:  # pickle runs code of the object
        return FormatError(f"it cannot be pickled: {error!r}")


def _bytes(data: bytes | FormatError) -> Any:
    return np.frombuffer(data, np.uint8)  # type: ignore[arg-type]


def _fill(given: list[Any] | None, objects: list[Any]) -> list[Any]:
    if given is None:
        return objects
    if len(given) != len(objects):
        raise ValueError(f"the list for the objects has {len(given)} entries for {len(objects)}")
    given[:] = objects
    return given
