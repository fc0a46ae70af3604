"""When gradients are ready, and when a backward begins and ends."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from drumline import _core
from drumline.ddp.autograd import End, calling
from drumline.ddp.buckets import SharedBuckets
from drumline.ddp.device_buckets import DeviceBuckets, Devices
from drumline.ddp.graph import functions_of, parameters_reached
from drumline.ddp.times import Times
from drumline.torch import profile

_STOP_PATIENCE_S = 5.0


class Buckets(Protocol):
    """The memory of gradients, and how they are averaged."""

    places: list[Any]
    averages: bool
    """Whether the ranks' gradients become their average, and not what a function of the user makes of them."""

    def bring(self, index: int) -> None: ...
    def bring_zeros(self, index: int) -> None: ...
    def synchronize(self, used: Sequence[bool]) -> list[bool]: ...
    def take(self, index: int) -> None: ...
    def abort(self) -> None: ...
    def leave(self, patience_s: float) -> None: ...
    def drop(self) -> None: ...


class Reducer:
    """Averages the gradients of ``parameters`` over the ranks of ``group`` while backward runs.

    A gradient that is final goes to the buckets, in any order. The end of backward waits for all
    averages. A parameter without a gradient is an error that names it on every rank, unless
    `filter_unused_parameters` has found it unused (needs ``marks``), or with ``find_unused``.

    ``static_graph``: the first backward counts the gradients of each parameter, and later ones rely on
    the count. ``sync_backward=False``: `synchronize` waits, not the end of backward. ``by_forward``: only
    a backward through the outputs of an `expect`ed forward is averaged; otherwise every backward is,
    while `sync_grad`. ``wire``: the type in which gradients travel. ``after_step`` is called when all
    gradients of a backward are averaged. ``devices``: where the ranks keep the whole model.
    """

    def __init__(
        self,
        group: _core.Group,
        parameters: dict[str, Any],
        *,
        bucket_bytes: int | None = None,
        find_unused: bool = False,
        marks: bool = False,
        static_graph: bool = False,
        sync_backward: bool = True,
        by_forward: bool = False,
        wire: Any = None,
        after_step: Callable[[], None] = lambda: None,
        devices: Devices | None = None,
    ) -> None:
        self.sync_grad = True
        """Whether gradients are averaged; without, they add up on each rank."""
        self.names, self.parameters = list(parameters), list(parameters.values())
        self.group, self.bucket_bytes = group, bucket_bytes
        self.devices = Devices(group, self.parameters) if devices is None else devices
        self.has_marks = marks or find_unused or static_graph
        self.scale: float | None = None
        self.sync_backward = sync_backward
        self.times = Times()
        self.steps = 0
        """Backward passes that were averaged."""
        self.unused_bytes = 0
        """Bytes of the parameters that no rank has used in the last one; 0 without marks."""
        self._find_unused, self._by_forward = find_unused, by_forward
        self._after_step = after_step
        self._make: Callable[[], Buckets] = lambda: self.own_buckets(wire)
        self._buckets: Buckets = self._make()
        # Gradients per parameter in a backward. None: a static graph before its first backward.
        self._calls: list[int] | None = None if static_graph else [1] * len(self.names)
        self._used = [False] * len(self.names)
        self._unreached: list[int] = []
        self._tolerant = find_unused
        self._expected = False
        self._lock = threading.RLock()
        # Whether a backward that may be averaged is running.
        self._is_running = False
        self._step: _Step | None = None
        self._failure: str | None = None
        handles = [
            parameter.register_post_accumulate_grad_hook(calling(self, "_on_gradient", index))
            for index, parameter in enumerate(self.parameters)
        ]
        self._finalizer = weakref.finalize(self, _dispose, handles, [self._buckets])
        self._finalizer.atexit = False

    def own_buckets(self, wire: Any = None) -> Buckets:
        """Buckets on GPUs, or else in memory that ranks share. Gradients travel as ``wire`` where that is
        shorter. A collective."""
        if self.devices.are_used:
            return DeviceBuckets(self, self.devices, wire)
        return SharedBuckets(
            self.group, self.names, self.parameters, self.bucket_bytes, self.has_marks, wire
        )

    def set_static_graph(self) -> None:
        """As with ``static_graph``, from the next backward on. A collective."""
        self.has_marks, self._calls = True, None
        self.replace_buckets(self._make)

    def replace_buckets(self, make: Callable[[], Buckets]) -> None:
        """Moves gradients to other buckets, between steps. A collective."""
        if self._step is not None:
            raise RuntimeError("buckets cannot be replaced in the middle of a backward")
        _, _, (handles, _), _ = self._finalizer.detach()  # type: ignore[misc]
        self._buckets.leave(_STOP_PATIENCE_S)
        self._make, self._buckets = make, make()
        self._finalizer = weakref.finalize(self, _dispose, handles, [self._buckets])
        self._finalizer.atexit = False

    def expect(self, outputs: Any) -> None:
        """Has the backward through these outputs of forward averaged."""
        functions = functions_of(outputs)
        for function in functions:
            function.register_prehook(self._on_outputs)
        self._expected = not functions

    def expect_nothing(self) -> None:
        """Forward has run without `expect`."""
        self._expected = False

    def filter_unused_parameters(self, outputs: Any) -> None:
        """Parameters that do not take part in ``outputs`` are not waited for in the next backward."""
        if not self.has_marks:
            raise ValueError("filter_unused_parameters needs a reducer with marks")
        reached = parameters_reached(outputs)
        self._unreached = [
            index for index, it in enumerate(self.parameters) if id(it) not in reached
        ]
        self._tolerant = True

    @property
    def is_pending(self) -> bool:
        """Whether there are averages that `synchronize` is to wait for."""
        return self._step is not None and not self._is_running

    def synchronize(self) -> None:
        """Waits for all averages of a backward, where its end has not."""
        if self._step is not None:
            self._finish(self._step)

    def stop(self) -> None:
        """Leaves the other ranks in good order, after waiting for them a few seconds. Later gradients are
        not averaged."""
        self.sync_grad = False
        self._failure = "the reducer was stopped"
        self._buckets.leave(_STOP_PATIENCE_S)
        self.devices.leave(_STOP_PATIENCE_S)

    def check(self) -> None:
        """Raises if gradients cannot be averaged any more."""
        if self._failure is not None:
            raise RuntimeError(f"gradients cannot be averaged: {self._failure}")
        if self.group.is_destroyed:
            raise RuntimeError(
                f"gradients cannot be averaged: group {self.group.name!r} has been destroyed. Make a group, "
                "and wrap the module anew"
            )
        if self.is_pending:
            raise RuntimeError(
                "nobody has waited for the averages of the last backward: call finalize_backward() of the "
                "wrapper, or synchronize() of the reducer, after every backward"
            )

    @property
    def has_rest(self) -> bool:
        """Whether gradients were added up since the last averages."""
        return any(map(self._is_rest, range(len(self.names))))

    def _is_rest(self, index: int) -> bool:
        return self._used[index] and self.parameters[index].grad is not None

    def shadow(self) -> None:
        """Takes part in a backward of the other ranks, with gradients that were added up before or else with zeros, and
        gets the averages."""
        self.check()
        rest = [self._is_rest(index) for index in range(len(self.names))]
        self._used = [False] * len(self.names)
        for index, is_there in enumerate(rest):
            if is_there:
                self._buckets.bring(index)
            else:
                self._buckets.bring_zeros(index)
        self._take(self._buckets.synchronize([it or not self.has_marks for it in rest]))

    # Callbacks of backward.

    def _on_outputs(self, _gradients: Any) -> None:
        self._begin()

    def _begin(self) -> None:
        """Asks autograd to call at the end of the running backward, the outermost one if nested."""
        if not self._is_running:
            self._is_running = True
            self.times.mark("backward")
            # No other reference: the callback must be dropped when backward drops it.
            torch.autograd.Variable._execution_engine.queue_callback(End(self._on_end, self._on_failure))

    def _on_gradient(self, index: int, _parameter: Any) -> None:
        # Autograd has a thread for each GPU.
        with self._lock:
            self._have_gradient(index)

    def _have_gradient(self, index: int) -> None:
        self._used[index] = True
        if not self._is_running:
            if not (self._expected or (self.sync_grad and not self._by_forward)):
                return
            self._begin()
        step = self._step
        if step is None:
            self.check()
            self.times.mark("gradient")
            step = self._step = _Step(len(self.names), self._calls)
            step.event = profile.begin("drumline:all_reduce", self.parameters)
            if self._calls is not None:
                idle = [i for i, calls in enumerate(self._calls) if calls == 0]
                for unused in {*self._unreached, *idle}:
                    step.due[unused] = 0
                    self._bring_unused(step, unused)
        step.came[index] += 1
        step.due[index] -= 1
        if step.due[index] == 0:
            step.is_brought[index] = True
            self._buckets.bring(index)
        elif step.is_brought[index]:
            raise RuntimeError(self._too_often(index))

    def _bring_unused(self, step: _Step, index: int) -> None:
        """Brings what was accumulated before, or zeros. `_finish` restores it if no rank uses the parameter."""
        gradient = self.parameters[index].grad
        if gradient is None:
            self._used[index] = False
        elif not self._used[index]:
            step.before[index] = gradient.clone()
        step.is_brought[index] = True
        self._buckets.bring(index)

    def _on_end(self) -> None:
        """Backward has ended without an error."""
        self._is_running = False
        if self._step is not None and self.sync_backward:
            self._finish(self._step)

    def _on_failure(self) -> None:
        """Backward has raised."""
        self._is_running = False
        if self._step is not None:
            profile.end(self._step.event, [])
            self._step = None
            self._failure = "a backward has raised on this rank before all gradients were averaged"
            self._buckets.abort()

    def _finish(self, step: _Step) -> None:
        if self._tolerant or self._calls is None:
            for index, is_brought in enumerate(step.is_brought):
                if not is_brought:
                    self._bring_unused(step, index)
        used, self._used = self._used, [False] * len(self.names)
        self._step, self._unreached, self._tolerant = None, [], self._find_unused
        self.times.mark("gradients")
        try:
            used_anywhere = self._synchronize(step, used)
        except _core.NotBroughtError as error:
            raise _core.NotBroughtError(f"backward, {error}. {_UNUSED}") from None
        except _core.CollectiveError as error:
            text = f"backward, {error}. Look at what the ranks that are named here have printed"
            told = type(error)(text)
            told.cause, told.culprit = error.cause, error.culprit
            raise told from None
        if self._calls is None:
            self._calls = step.came
        self._take(used_anywhere)
        for index, gradient in step.before.items():
            if not used_anywhere[index]:
                self.parameters[index].grad.copy_(gradient)
        self.steps += 1
        self.times.end_step()
        self._after_step()

    def _synchronize(self, step: _Step, used: Sequence[bool]) -> list[bool]:
        try:
            return self._buckets.synchronize(used)
        finally:
            profile.end(step.event, [])

    def _take(self, used: Sequence[bool]) -> None:
        """Makes averages the gradients of the parameters that were used."""
        gradients, self.unused_bytes = [], 0
        for index, (parameter, is_used) in enumerate(zip(self.parameters, used, strict=True)):
            if is_used:
                self._buckets.take(index)
                gradients.append(parameter.grad)
            elif self.has_marks:
                self.unused_bytes += parameter.nbytes
        if gradients and self.scale is not None and self._buckets.averages:
            torch._foreach_mul_(gradients, self.scale)

    def _too_often(self, index: int) -> str:
        name = self.names[index]
        if index in self._unreached:
            return (
                f"parameter {name} got a gradient, but the outputs of forward do not lead to it. With "
                "checkpoint(use_reentrant=True), find_unused_parameters cannot see what is used"
            )
        return (
            f"parameter {name} got more gradients in one backward than expected: it is used in several "
            "reentrant backward passes. Use checkpoint(use_reentrant=False), or static_graph=True"
        )


_UNUSED = (
    "A parameter without a gradient has not taken part in the loss: pass find_unused_parameters=True "
    "if that may be so"
)


class _Step:
    """A backward whose gradients are averaged."""

    def __init__(self, count: int, calls: list[int] | None) -> None:
        self.came = [0] * count
        self.due = [-1] * count if calls is None else list(calls)
        self.is_brought = [False] * count
        # Gradients of parameters that this rank did not use.
        self.before: dict[int, Any] = {}
        # From the first gradient to the last average. Buckets are the core's affair.
        self.event: profile.Event | None = None


def _dispose(handles: list[Any], buckets: list[Buckets]) -> None:
    for handle in handles:
        handle.remove()
    for bucket in buckets:
        bucket.drop()
