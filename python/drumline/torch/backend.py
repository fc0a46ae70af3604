"""The backend: one process group of torch's on one of drumline's."""

# pyright: reportIncompatibleMethodOverride=false

from __future__ import annotations

import logging
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend

from drumline import _core, _exit
from drumline._core import Group
from drumline._registered import zeros
from drumline.torch.arguments import checked_tag, only
from drumline.torch.barrier import MonitoredBarrier
from drumline.torch.collectives import Collectives
from drumline.torch.calls import LONGEST, PER_GROUP
from drumline.torch.store import backend_of, master_of
from drumline.torch.work import DrumlineWork, as_dist_error, is_news, patch_holder

_log = logging.getLogger(__name__)

# torch may wrap a backend and drop its Python object, which must live on.
_LIVING: set[DrumlineBackend] = set()

# Seconds that destroy_process_group waits for ranks that have not called it.
_PATIENCE_S = 5.0


def create(options: Any, backend_options: Any) -> Backend:
    """Makes a backend. torch calls this for every group of this rank."""
    patch_holder()
    ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    is_world = not options.global_ranks_in_group
    name = "world" if is_world else str(options.group_id)
    return connect(options.store, options.group_rank, ranks, name, options.timeout)


def connect(
    store: dist.Store, rank: int, ranks: list[int], name: str, timeout: timedelta
) -> DrumlineBackend:
    """A backend for a group. ``ranks`` are the members' numbers in the job, ``rank`` is this one's index."""
    settings: dict[str, Any] = {"timeout": timeout.total_seconds()}
    if backend := backend_of(store):
        settings["backend"] = backend
    try:
        group = Group.connect(name, store, rank, ranks, master_of(store), settings)
    except _core.DrumlineError as error:
        raise as_dist_error(error) from None
    return DrumlineBackend(group, store, timeout, ranks)


class DrumlineBackend(Collectives):
    """The methods of a torch backend beside collectives: properties, messages, end.

    torch has checked the arguments, and turned global ranks into ranks of the group.
    """

    def __init__(
        self, group: Group, store: dist.Store, timeout: timedelta, ranks: list[int]
    ) -> None:
        super().__init__(group, timeout)
        self._ranks = ranks
        self._options = Backend.Options("drumline", min(timeout, LONGEST))
        self._options.global_ranks_in_group = ranks
        self._monitored_barrier = MonitoredBarrier(store, group)
        _LIVING.add(self)
        _exit.watch(group)

    def getBackendName(self) -> str:  # noqa: N802 (torch's name)
        return "drumline"

    @property
    def options(self) -> Backend.Options:
        return self._options

    # Each must be answered here: torch's own answer asks this class again.
    supports_splitting = property(lambda self: True)
    supports_coalescing = property(lambda self: False)
    supports_shrinking = property(lambda self: False)
    supports_reconfigure = property(lambda self: False)
    supports_window = property(lambda self: False)
    supports_abort_hooks = property(lambda self: False)
    supports_completion_hooks = property(lambda self: False)
    _supports_time_estimate = property(lambda self: False)

    # Memory that is reduced without a copy. FSDP2 uses it if configured so.

    def supports_tensor_alloc(self, device: torch.device | int) -> bool:
        # torch's DDP in C++ asks with a number. The call that follows has no form in Python (torch 2.15).
        return isinstance(device, torch.device) and device.type == "cpu"

    def allocate_tensor(
        self, size: int, *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        if not self.supports_tensor_alloc(device):
            raise ValueError(f"drumline shares memory of the CPU, and none of {device}")
        tensor: torch.Tensor = zeros(self._group, size, dtype)
        return tensor

    def _get_sequence_number_for_group(self) -> int:
        return self._sequence

    def _set_sequence_number_for_group(self) -> None:
        """Counts from 0 on all ranks already."""

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout
        self._options._timeout = min(timeout, LONGEST)
        self._group.set_timeout(timeout.total_seconds())

    _set_default_timeout = set_timeout

    # Messages, and the barrier whose error names missing ranks.

    def send(self, tensors: list[torch.Tensor], to: int, tag: int) -> DrumlineWork:
        tensor = only(tensors, "send")
        staging = self._on_device.staging_of_message(tensor)
        data = staging.read(tensor)
        return self._post("send", tensor, staging, "send", data, to, checked_tag(tag))

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> DrumlineWork:
        return self._receive("recv", tensors, source, tag)

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int) -> DrumlineWork:
        return self._receive("recvAnySource", tensors, None, tag)

    def _receive(
        self, title: str, tensors: list[torch.Tensor], source: int | None, tag: int
    ) -> DrumlineWork:
        tensor = only(tensors, "recv")
        staging = self._on_device.staging_of_message(tensor)
        data = staging.write(tensor)
        return self._post(title, tensor, staging, "recv", data, source, checked_tag(tag))

    def monitored_barrier(self, opts: Any, wait_all_ranks: bool = False) -> None:
        timeout = opts.timeout if opts.timeout != PER_GROUP else self._timeout
        self._monitored_barrier.wait(timeout, wait_all_ranks)

    # Groups of some of the ranks, and the end.

    def split(self, store: dist.Store, ranks: list[int], opts: Any) -> DrumlineBackend | None:
        if self.rank() not in ranks:
            return None
        name = getattr(opts, "group_name", "") or f"{self._group.name}/{ranks}"
        timeout = getattr(opts, "_timeout", self._timeout)
        return connect(
            store, ranks.index(self.rank()), [self._ranks[rank] for rank in ranks], name, timeout
        )

    def shutdown(self) -> None:
        _LIVING.discard(self)
        patience = _exit.HANDLER_PATIENCE_S if _exit.in_handler() else _PATIENCE_S
        try:
            self._on_device.leave(patience)
            self._group.leave(patience)
        except _core.DrumlineError as error:
            if _is_news_of_a_mismatch(error):
                raise as_dist_error(error) from None
            if is_news(error):
                _log.warning("left a group that had failed: %s", error)

    def eager_connect_single_device(self, device: torch.device) -> None:
        """Begins to use a GPU, on all ranks: ``device_id=`` of `init_process_group`."""
        self._staging_on(device)

    def abort(self) -> None:
        _LIVING.discard(self)
        self._on_device.abort()
        self._group.abort()


def _is_news_of_a_mismatch(error: _core.DrumlineError) -> bool:
    """Whether the end of a group shows that ranks made different calls.

    A call that needs no answer returns before its rank can know of that. All other failures have been
    raised before, by the call that failed, or are no reason to keep the group. A peer that reports a
    mismatch blames no rank.
    """
    if not isinstance(error, _core.CollectiveError) or isinstance(error, _core.PoisonedError):
        return False
    return error.cause == "mismatch" or (error.cause == "reported" and error.culprit is None)
