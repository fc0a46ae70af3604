"""What a group of torch's can do on a group of drumline's, whichever of torch's classes it is."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from drumline import _core, _exit
from drumline._core import Group
from drumline._registered import zeros
from drumline.torch.arguments import checked_tag, only
from drumline.torch.barrier import MonitoredBarrier
from drumline.torch.calls import LONGEST, PER_GROUP
from drumline.torch.collectives import Collectives
from drumline.torch.store import backend_of, master_of
from drumline.torch.work import DrumlineWork, as_dist_error, is_news

_log = logging.getLogger(__name__)

# torch may wrap a group and drop its Python object, which must live on.
_LIVING: set[Operations] = set()

# Seconds that destroy_process_group waits for ranks that have not called it.
_PATIENCE_S = 5.0


@dataclass(frozen=True)
class Place:
    """Where a rank is in a group of torch's, and what the group is made with."""

    store: dist.Store
    rank: int
    ranks: list[int]
    """The members' numbers in the job; ``rank`` is an index."""
    name: str
    timeout: timedelta

    @staticmethod
    def of(options: Any) -> Place:
        """The place that torch tells a creator of backends."""
        ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
        name = str(options.group_id) if options.global_ranks_in_group else "world"
        return Place(options.store, options.group_rank, ranks, name, options.timeout)

    def connect(self) -> Group:
        """The group of the core."""
        settings: dict[str, Any] = {"timeout": self.timeout.total_seconds()}
        if backend := backend_of(self.store):
            settings["backend"] = backend
        try:
            return Group.connect(
                self.name, self.store, self.rank, self.ranks, master_of(self.store), settings
            )
        except _core.DrumlineError as error:
            raise as_dist_error(error) from None

    def within(self, store: dist.Store, ranks: list[int], name: str, timeout: timedelta) -> Place:
        """The place in a group of some of the ranks, this one among them."""
        members = [self.ranks[rank] for rank in ranks]
        return Place(store, ranks.index(self.rank), members, name, timeout)


class Operations(Collectives):
    """The methods of torch's backends and process groups beside collectives: properties, messages, end.

    torch has checked the arguments, and turned global ranks into ranks of the group.
    """

    def __init__(self, place: Place, group: Group, options: Any) -> None:
        super().__init__(group, place.timeout)
        self._place = place
        self._options = options
        self._options.global_ranks_in_group = place.ranks
        self._monitored_barrier = MonitoredBarrier(place.store, group)
        _LIVING.add(self)
        _exit.watch(group)

    def getBackendName(self) -> str:  # noqa: N802 (torch's name)
        return "drumline"

    @property
    def options(self) -> Any:
        return self._options

    # Each must be answered here: torch's own answer asks this class again.
    supports_splitting = property(lambda self: True)
    supports_coalescing = property(lambda self: False)
    supports_shrinking = property(lambda self: False)
    supports_reconfigure = property(lambda self: False)
    supports_window = property(lambda self: False)
    supports_abort_hooks = property(lambda self: True)
    supports_completion_hooks = property(lambda self: False)
    _supports_time_estimate = property(lambda self: False)

    # Hooks that run before a failed or aborted group is of no use.

    def registerAbortHook(self, number: int, hook: Callable[[], None]) -> None:  # noqa: N802
        self._abort_hooks[number] = hook

    def unregisterAbortHook(self, number: int) -> None:  # noqa: N802
        self._abort_hooks.pop(number, None)

    register_abort_hook, unregister_abort_hook = registerAbortHook, unregisterAbortHook

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

    def _monitor(self, timeout: timedelta | None, wait_all_ranks: bool) -> None:
        """The barrier of torch's ``monitored_barrier``."""
        limit = self._timeout if timeout in (None, PER_GROUP) else timeout
        self._monitored_barrier.wait(limit, wait_all_ranks)

    # The end.

    def shutdown(self) -> None:
        _LIVING.discard(self)
        patience = _exit.HANDLER_PATIENCE_S if _exit.in_handler() else _PATIENCE_S
        try:
            self._on_device.leave(patience)
            if not self._group.is_destroyed:  # by an ElasticGroup
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
        self._tell_of_abort()
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
