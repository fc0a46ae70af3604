"""Runs calls of torch on the calling thread or in the background."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch

from drumline import _core
from drumline.torch import profile
from drumline.torch.on_device import OnDevice, Placing
from drumline.torch.register import version_of
from drumline.torch.tensors import Staging
from drumline.torch.work import DrumlineWork, as_dist_error

_log = logging.getLogger(__name__)

PER_GROUP = timedelta(milliseconds=-1)
"""torch passes this if the program gives no time limit."""

# Some 30 years: torch's clocks count so far in any unit. Longer limits count as this one.
LONGEST = timedelta(days=10_000)

# Older ones wait for a Work of every call, also of one that has ended.
_TAKES_NONE = version_of(torch.__version__) >= (2, 8)

Call = tuple[Any, ...]
"""A method of the core's groups by its name, and its arguments: those between ``stream`` and ``background``."""


class Calls:
    """The part of the backend that calls the group of the core. It knows none of torch's groups."""

    def __init__(self, group: _core.Group, timeout: timedelta) -> None:
        self._group = group
        self._timeout = timeout
        self._sequence = 0
        self._on_device = OnDevice(group)
        self._abort_hooks: dict[int, Callable[[], None]] = {}
        self._has_told = False

    def _staging(self, *tensors: torch.Tensor) -> Staging:
        """How the tensors of a call reach the core, where they are."""
        for tensor in tensors:
            if not tensor.is_cpu:
                return self._staging_on(tensor.device)
        return Staging()

    def _staging_on(self, device: torch.device | None) -> Staging:
        try:
            return self._on_device.staging_on(device)
        except _core.DrumlineError as error:
            raise as_dist_error(error) from None

    def _run(
        self,
        title: str,
        opts: Any,
        inputs: list[torch.Tensor],
        outputs: list[torch.Tensor],
        staging: Staging,
        *calls: Call,
    ) -> DrumlineWork | None:
        """Runs calls: on this thread if torch waits for them, or else in the background. Those on a GPU are queued.

        The profiler gets ``inputs``; ``outputs`` become the value of the future. None: the calls have ended.
        """
        self._sequence += 1
        group = self._within(opts.timeout)
        # Before 2.7 torch does not say of every call whether it waits. Then it may not.
        background = getattr(opts, "asyncOp", True)
        if background or profile.is_on() or isinstance(staging, Placing) or not _TAKES_NONE:
            return self._begin(title, inputs, outputs, staging, group, calls, background)
        try:
            for call in calls:
                getattr(group, call[0])(*call[1:], False)
        except _core.DrumlineError as error:
            raise self._failed(error) from None
        staging.finish()
        return None

    def _post(
        self, title: str, tensor: torch.Tensor, staging: Staging, *call: Any
    ) -> DrumlineWork:
        """Sends or receives a message, always in the background."""
        return self._begin(title, [tensor], [tensor], staging, self._group, [call])

    def _begin(
        self,
        title: str,
        inputs: list[torch.Tensor],
        outputs: list[torch.Tensor],
        staging: Staging,
        group: _core.Group,
        calls: Sequence[Call],
        *background: bool,
    ) -> DrumlineWork:
        """Begins calls, in the ``background`` or not, or queues them."""
        event = profile.begin(title, inputs)
        handles: list[Any] = []
        try:
            for method, *arguments in calls:
                if isinstance(staging, Placing):
                    handles.append(staging.queue(method, *arguments))
                    if method == "send":
                        self._on_device.has_sent(handles[-1])
                elif (work := getattr(group, method)(*arguments, *background)) is not None:
                    handles.append(work)
        except _core.DrumlineError as error:
            raise self._failed(error) from None
        finally:
            profile.end(event, handles)
        if not handles:
            staging.finish()
        return DrumlineWork(title, handles, staging, outputs, self._failed)

    def _failed(self, error: BaseException) -> BaseException:
        """The error of a call as torch's, after its hooks have seen the group fail."""
        self._tell_of_abort()
        return as_dist_error(error)

    def _tell_of_abort(self) -> None:
        """Calls the hooks: a failed group stays failed, so once. One that raises keeps nobody from the error."""
        if self._has_told:
            return
        self._has_told = True
        for hook in list(self._abort_hooks.values()):
            try:
                hook()
            except Exception:
                _log.exception("a hook for the end of a failed group has raised")

    def _within(self, timeout: timedelta) -> _core.Group:
        """A handle of the group with this time limit."""
        if timeout == PER_GROUP or timeout == self._timeout:
            return self._group
        return self._group.within(timeout.total_seconds())
