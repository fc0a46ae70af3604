"""Groups of a torch without backends in Python: the group that torch holds is ours.

torch's class would pass calls on to one backend for each kind of device. Here it passes on those for devices that
other backends have, to a group of torch's.
"""

# pyright: reportIncompatibleMethodOverride=false, reportIncompatibleVariableOverride=false

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch._C._distributed_c10d as c10d
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroup
from torch.distributed import distributed_c10d

from drumline.torch.calls import LONGEST, PER_GROUP
from drumline.torch.elsewhere import elsewhere
from drumline.torch.kept import KeptWorks
from drumline.torch.operations import Operations, Place
from drumline.torch.register import version_of
from drumline.torch.work import DrumlineWork

_DEVICES = ("cpu", "cuda")

# Whether C++ drops the half of a Work that is in Python.
_DROPS_WORKS = version_of(torch.__version__) < (2, 8)
_kept = KeptWorks()


def create(options: Any, backend_options: Any) -> ProcessGroup:
    """Makes a process group. torch calls this for every group of this rank."""
    # Before 2.7, `destroy_process_group` shuts down NCCL alone. The flight recorder looks for a backend in C++.
    _have_torch_call("_shutdown_backend", DrumlineProcessGroup.shutdown)
    _have_torch_call("_maybe_attach_flight_recorder", lambda group: None)
    _have_reducers_wait()
    return DrumlineProcessGroup(Place.of(options), _asked_for(), backend_options)


def _asked_for() -> dict[str, str]:
    """The backend of each kind of device, as in ``"cpu:drumline,cuda:nccl"``. torch tells it nobody whom it calls."""
    frame = sys._getframe()
    while frame.f_code.co_name != "_new_process_group_helper":
        if frame.f_back is None:
            return dict.fromkeys(_DEVICES, "drumline")
        frame = frame.f_back
    return dict(frame.f_locals["backend_config"].get_device_backend_map())


def _have_torch_call(name: str, ours: Callable[[DrumlineProcessGroup], None]) -> None:
    """Has a function of torch's for a group, if there is one, do this for groups of ours."""
    theirs = getattr(distributed_c10d, name, None)
    if theirs is None or hasattr(theirs, "_drumline"):
        return

    def function(group: Any, *others: Any) -> None:
        ours(group) if isinstance(group, DrumlineProcessGroup) else theirs(group, *others)

    function._drumline = True  # type: ignore[attr-defined]
    setattr(distributed_c10d, name, function)


def _have_reducers_wait() -> None:
    """Hands the Work of torch's `join` to the Reducer as one of C++. The Reducer keeps no half of a Work in Python, and
    waits for ever when ours is gone."""
    theirs = c10d.Reducer._set_forward_pass_work_handle
    if hasattr(theirs, "_drumline"):
        return

    def method(self: c10d.Reducer, work: dist.Work, use_static_world_size: bool) -> None:
        if isinstance(work, DrumlineWork):
            work = c10d._create_work_from_future(work.get_future())
        theirs(self, work, use_static_world_size)

    method._drumline = True  # type: ignore[attr-defined]
    c10d.Reducer._set_forward_pass_work_handle = method  # type: ignore[method-assign]


class DrumlineProcessGroup(Operations, ProcessGroup):  # type: ignore[misc]
    """drumline as a process group of torch's."""

    def __init__(self, place: Place, backends: dict[str, str], backend_options: Any) -> None:
        group = place.connect()
        ProcessGroup.__init__(self, group.rank, group.world_size)
        options = SimpleNamespace(backend="drumline", _timeout=min(place.timeout, LONGEST))
        Operations.__init__(self, place, group, options)
        self._backends = backends
        self._elsewhere = elsewhere(place, backends, backend_options)
        self._names = ["", ""]

    # torch's class asks its backends for names.

    def getGroupName(self) -> str:  # noqa: N802 (torch's name)
        return self._names[0]

    def getGroupDesc(self) -> str:  # noqa: N802
        return self._names[1]

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._names[0] = name

    def setGroupDesc(self, text: str) -> None:  # noqa: N802
        self._names[1] = text

    _set_group_name, _set_group_desc = setGroupName, setGroupDesc  # type: ignore[assignment]
    group_name, group_desc = property(getGroupName), property(getGroupDesc)

    # What it knows of its backends.

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(kind) for kind in self._backends]

    def _get_backend(self, device: torch.device) -> Any:
        other = self._elsewhere.get(device.type)
        return self if other is None else other._get_backend(device)

    get_backend = _get_backend

    def get_group_store(self) -> dist.Store:
        return self._place.store

    def eager_connect_single_device(self, device: torch.device) -> None:
        # torch has told it to the group that this one replaces.
        self.bound_device_id = device
        super().eager_connect_single_device(device)

    # Calls beside collectives.

    def monitored_barrier(
        self, timeout: timedelta | None = PER_GROUP, wait_all_ranks: bool = False
    ) -> None:
        self._monitor(timeout, wait_all_ranks)

    def split_group(
        self,
        ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Sequence[torch.device] | None = None,
    ) -> DrumlineProcessGroup | None:
        if self._place.rank not in ranks:
            return None
        name = group_name or f"{self._group.name}/{list(ranks)}"
        store = dist.PrefixStore(f"{name}/", self._place.store)
        kinds = [it.type for it in device_types or self._device_types]
        part = DrumlineProcessGroup(
            self._place.within(store, list(ranks), name, timeout or self._timeout),
            {kind: self._backends[kind] for kind in kinds},
            opts,
        )
        part.setGroupName(name)
        part.setGroupDesc(group_desc or f"{self.group_desc}:split")
        return part

    def shutdown(self) -> None:
        self._tell_others("shutdown")
        super().shutdown()

    def abort(self) -> None:
        self._tell_others("abort")
        super().abort()

    def _tell_others(self, method: str) -> None:
        for other in set(self._elsewhere.values()):
            if hasattr(other, method):
                getattr(other, method)()
            else:  # before 2.7
                getattr(distributed_c10d, "_shutdown_backend")(other)  # noqa: B009 (newer ones lack it)

    def _register_on_completion_hook(self, hook: Callable[[Any], None]) -> None:
        raise NotImplementedError(
            "Backend drumline does not support onCompletion hooks: torch makes what they are told (WorkInfo) in C++ alone"
        )

    def _start_coalescing(self, device: torch.device) -> None:
        self._coalescing(device)._start_coalescing(device)

    def _end_coalescing(self, device: torch.device) -> Any:
        return self._coalescing(device)._end_coalescing(device)

    def _coalescing(self, device: torch.device) -> ProcessGroup:
        if device.type not in self._elsewhere:
            raise NotImplementedError(
                "drumline does not coalesce calls of a device: give _coalescing_manager no device"
            )
        return self._elsewhere[device.type]


def _kept_if_needed(work: Any) -> Any:
    return _kept.add(work) if _DROPS_WORKS else work


def _method(name: str, ours: str, tensors: int, kind: Any, fields: tuple[str, ...]) -> Any:
    """A method of torch's class: ``ours``, whose first arguments are ``tensors``, and the last one options of a kind.

    In the place of options it takes their ``fields`` and a time limit, and in the place of lists of one tensor a
    tensor. Either may be left out.
    """
    operation: Callable[..., DrumlineWork | None] = getattr(Operations, ours)
    takes_lists = "single" not in ours

    def method(self: DrumlineProcessGroup, *given: Any, **named: Any) -> Any:
        if self._elsewhere and (other := self._elsewhere.get(_kind_of(given) or "")):
            return getattr(other, name)(*given, **named)
        if kind is None or (len(given) == tensors + 1 and type(given[-1]) is kind):
            return _kept_if_needed(operation(self, *given))
        lists, others = list(given[:tensors]), list(given[tensors:])
        if takes_lists and any(isinstance(it, torch.Tensor) for it in lists):
            lists = [[it] for it in lists]
        opts = named.pop("opts", None) or next((it for it in others if type(it) is kind), None)
        if opts is None:
            opts = kind()
            named.update(zip((*fields, "timeout"), others, strict=False))
            for field, value in named.items():
                if value is not None:
                    setattr(opts, _FIELDS.get(field, field), value)
        return _kept_if_needed(operation(self, *lists, opts))

    method.__name__ = method.__qualname__ = name
    return method


# What torch's short forms call fields of options.
_FIELDS = {"op": "reduceOp", "root": "rootRank"}


def _kind_of(given: Sequence[Any]) -> str | None:
    """The kind of the device on which a call is."""
    for it in given:
        device = getattr(it, "device", None)
        kind = _kind_of(it) if isinstance(it, (list, tuple)) else device and device.type
        if kind:
            return kind
    return None


_METHODS: list[tuple[str, int, Any, tuple[str, ...]]] = [
    ("broadcast", 1, c10d.BroadcastOptions, ("rootRank",)),
    ("allreduce", 1, c10d.AllreduceOptions, ("reduceOp",)),
    ("allreduce_coalesced", 1, c10d.AllreduceCoalescedOptions, ()),
    ("reduce", 1, c10d.ReduceOptions, ("rootRank", "reduceOp")),
    ("allgather", 2, c10d.AllgatherOptions, ()),
    ("allgather_coalesced", 2, c10d.AllgatherOptions, ()),
    ("gather", 2, c10d.GatherOptions, ("rootRank",)),
    ("scatter", 2, c10d.ScatterOptions, ("rootRank",)),
    ("reduce_scatter", 2, c10d.ReduceScatterOptions, ("reduceOp",)),
    ("alltoall", 2, c10d.AllToAllOptions, ()),
    ("all_gather_single", 2, c10d.AllgatherOptions, ()),
    ("all_gather_single_coalesced", 2, c10d.AllgatherOptions, ()),
    ("reduce_scatter_single", 2, c10d.ReduceScatterOptions, ()),
    ("reduce_scatter_single_coalesced", 2, c10d.ReduceScatterOptions, ()),
    ("all_to_all_single", 4, c10d.AllToAllOptions, ()),
    ("barrier", 0, c10d.BarrierOptions, ()),
    ("send", 1, None, ()),
    ("recv", 1, None, ()),
    ("recv_anysource", 1, None, ()),
]

# What torch calls them too: before 2.14, or in C++.
_OTHER_NAMES = {
    "all_gather_single": "_allgather_base",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "reduce_scatter_single": "_reduce_scatter_base",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
    "all_to_all_single": "alltoall_base",
    "recv_anysource": "recvAnysource",
}

# What torch's class would pass on to a backend in C++, which it lacks here, or which only a backend has.
_REFUSED = (
    "new_window", "suspend", "resume", "memory_stats", "shrink", "reconfigure", "get_reconfigure_handle",
    "merge_remote_group",
)  # fmt: skip


def _refusal(name: str) -> Any:
    def method(self: DrumlineProcessGroup, *given: Any, **named: Any) -> Any:
        raise NotImplementedError(f"Backend drumline does not support {name}")

    return method


for _name in _REFUSED:
    setattr(DrumlineProcessGroup, _name, _refusal(_name))

for _ours, _tensors, _kind, _fields in _METHODS:
    for _name in {_ours, _OTHER_NAMES.get(_ours, _ours)}:
        setattr(DrumlineProcessGroup, _name, _method(_name, _ours, _tensors, _kind, _fields))
