"""Runs calls of torch on the calling thread or in the background."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import Backend

from drumline import _core
from drumline.torch import on_device, profile
from drumline.torch.tensors import Memory, Staging
from drumline.torch.work import DrumlineWork, as_dist_error

PER_GROUP = timedelta(milliseconds=-1)

# Some 30 years: torch's clocks count so far in any unit. Longer limits count as this one.
LONGEST = timedelta(days=10_000)
"""torch passes this if the program gives no time limit."""

Call = tuple[Any, ...]
"""A method of the core's group, and its arguments without the last, ``background``."""


class Calls(Backend):
    """The part of the backend that calls the group of the core."""

    def __init__(self, group: _core.Group, timeout: timedelta) -> None:
        super().__init__(group.rank, group.world_size)
        self._group = group
        self._timeout = timeout
        self._sequence = 0
        self._on_device = on_device.OnDevice(group)

    def _queue(
        self,
        title: str,
        inputs: list[torch.Tensor],
        outputs: list[torch.Tensor],
        call: Callable[..., _core.DeviceWork],
        *arguments: Any,
    ) -> DrumlineWork | None:
        """Queues a call on tensors of one GPU: ``call(end, stream, *tensors, *arguments)``. None: they must be
        staged."""
        device = inputs[0].device
        if device.type == "cpu":
            return None
        tensors = inputs + [tensor for tensor in outputs if tensor is not inputs[0]]
        places: list[Memory] = []
        for tensor in tensors:
            place = on_device.GPUS.memory(tensor) if tensor.device == device else None
            if place is None:
                return None
            places.append(place)
        end = self._on_device.of(device)
        if end is None:
            return None
        self._sequence += 1
        event = profile.begin(f"drumline:{title}", inputs)
        try:
            work = call(end, on_device.GPUS.stream(device), *places, *arguments)
        except _core.DrumlineError as error:
            raise as_dist_error(error) from None
        finally:
            profile.end(event, [])
        handle = on_device.Queued(work)
        return DrumlineWork(title, [handle], on_device.Joining(work, device), outputs)

    def _run(
        self,
        title: str,
        opts: Any,
        inputs: list[torch.Tensor],
        outputs: list[torch.Tensor],
        staging: Staging,
        *calls: Call,
    ) -> DrumlineWork:
        """Runs calls: on this thread if torch waits for them, or else in the background.

        The profiler gets ``inputs``; ``outputs`` become the value of the future.
        """
        self._sequence += 1
        group = self._within(opts.timeout)

        def start() -> list[_core.Work | None]:
            return [method(group, *arguments, opts.asyncOp) for method, *arguments in calls]

        return self._begin(title, inputs, outputs, staging, start)

    def _post(
        self, title: str, tensor: torch.Tensor, staging: Staging, *call: Any
    ) -> DrumlineWork:
        """Sends or receives a message, always in the background."""
        method, *arguments = call
        return self._begin(
            title, [tensor], [tensor], staging, lambda: [method(self._group, *arguments)]
        )

    def _begin(
        self,
        title: str,
        inputs: list[torch.Tensor],
        outputs: list[torch.Tensor],
        staging: Staging,
        start: Callable[[], list[_core.Work | None]],
    ) -> DrumlineWork:
        event = profile.begin(f"drumline:{title}", inputs)
        handles: list[_core.Work] = []
        try:
            handles = [handle for handle in start() if handle is not None]
        except _core.DrumlineError as error:
            raise as_dist_error(error) from None
        finally:
            profile.end(event, handles)
        if not handles:
            staging.finish()
        return DrumlineWork(title, handles, staging, outputs)

    def _within(self, timeout: timedelta) -> _core.Group:
        """A handle of the group with this time limit."""
        if timeout in (PER_GROUP, self._timeout):
            return self._group
        return self._group.within(timeout.total_seconds())
