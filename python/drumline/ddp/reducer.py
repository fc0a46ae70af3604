"""When gradients are ready, and when a backward begins and ends."""

from __future__ import annotations

import os
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from drumline import _core
from drumline.ddp.autograd import End, calling
from drumline.ddp.buckets import Places, SharedBuckets
from drumline.ddp.device_buckets import DeviceBuckets, Devices
from drumline.ddp.graph import functions_of, parameters_reached
from drumline.ddp.times import Times
from drumline.torch import profile

_STOP_PATIENCE_S = 5.0
# Forwards of which no backward has been seen. Evaluations with gradients leave some behind.
_FORWARDS_MAX = 64


class Buckets(Protocol):
    """The memory of gradients, and how they are averaged."""

    places: Places
    averages: bool
    """Whether the ranks' gradients become their average, and not what a function of the user makes of them."""

    def bring(self, index: int) -> None: ...
    def bring_zeros(self, index: int) -> None: ...
    def synchronize(self, used: Sequence[bool]) -> list[bool]: ...
    def abort(self) -> None: ...
    def leave(self, patience_s: float) -> None: ...
    def drop(self) -> None: ...


class Reducer:
    """Averages the gradients of ``parameters`` over the ranks of ``group`` while backward runs.

    A gradient that is final goes to the buckets, in any order. The end of backward waits for all
    averages. A parameter without a gradient is an error that names it on every rank, unless
    `filter_unused_parameters` has found it unused (needs ``marks``), or with ``find_unused``.

    ``static_graph``: the first backward counts the gradients of each parameter, and later ones rely on
    the count. ``sync_backward=False``: `synchronize` waits, not the end of backward. ``by_forward``: a backward of a
    forward that `begin_forward` has announced is averaged, also one that does not go through its outputs; otherwise
    every backward is. Without `sync_grad` none is, but one through the outputs of such a forward.
    ``wire``: the type in which gradients travel. ``after_step`` is called when all gradients of a backward are
    averaged. ``devices``: where the ranks keep the whole model. ``views``: gradients lie in the memory in which they
    are averaged, and the next backward overwrites them; otherwise they are copied.
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
        views: bool = False,
    ) -> None:
        self.sync_grad = True
        """Whether gradients are averaged; without, they add up on each rank."""
        self.names, self.parameters = list(parameters), list(parameters.values())
        self.group, self.bucket_bytes = group, bucket_bytes
        self.devices = Devices(group, self.parameters) if devices is None else devices
        self.has_marks = marks or find_unused or static_graph
        self.views = views
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
        self._is_static = static_graph
        self._used = [False] * len(self.names)
        self._unreached: list[int] = []
        self._tolerant = find_unused
        _living.add(self)
        # Those whose gradients may still come. None: there was no forward yet.
        self._forwards: deque[_Forward] | None = None
        self._lock = threading.RLock()
        self._backward: _Backward | None = None
        self._step: _Step | None = None
        self._failure: str | None = None
        self._has_warned = [False, False]
        self._process = os.getpid()
        # torch.utils.swap_tensors would take the hooks away, unseen. It refuses tensors with weak references.
        self._kept = [weakref.ref(parameter) for parameter in self.parameters]
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
            self.group,
            self.names,
            self.parameters,
            self.bucket_bytes,
            self.has_marks,
            wire,
            self.views,
        )

    def set_static_graph(self) -> None:
        """As with ``static_graph``, from the next backward on. A collective."""
        self.has_marks, self._is_static, self._calls = True, True, None
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

    def begin_forward(self) -> _Forward:
        """A forward begins. Its backward is averaged, also one that runs inside of it."""
        if self._forwards is None:
            self._forwards = deque(maxlen=_FORWARDS_MAX)
        forward = _Forward(sum(it._version for it in self.parameters))
        # An optimizer has changed parameters that the graphs of earlier ones need.
        while self._forwards and self._forwards[0].version != forward.version:
            self._forwards.popleft()
        self._forwards.append(forward)
        return forward

    def expect(self, forward: _Forward, outputs: Any) -> None:
        """A forward has ended, and has returned this. Its gradients need not come by that."""
        for function in functions_of(outputs):
            function.register_prehook(calling(self, "_on_outputs", forward))

    def expect_nothing(self, outputs: Any) -> None:
        """A forward has run without `begin_forward`, and has returned this."""
        if self._forwards is None:
            self._forwards = deque(maxlen=_FORWARDS_MAX)
        for function in functions_of(outputs):
            function.register_prehook(calling(self, "_on_local_outputs"))

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
        return self._step is not None and self._backward is None

    def synchronize(self) -> None:
        """Waits for all averages of a backward, where its end has not."""
        if self._step is not None:
            self._finish(self._step)

    def drop(self) -> None:
        """Leaves the other ranks without waiting, as when nobody refers to this any more."""
        self._finalizer()

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
        if os.getpid() != self._process:
            raise RuntimeError(
                f"gradients cannot be averaged in this process: it is a fork of process {self._process}, to which the "
                "wrapper belongs. Use the module inside, or make a group and a wrapper here"
            )
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

    def averaged(self) -> list[Any]:
        """Copies of the gradients to which nothing was added since the last averages; None for others."""
        gradients = [it.grad for it in self.parameters]
        return [
            None if it is None or self._used[index] else it.detach().clone()
            for index, it in enumerate(gradients)
        ]

    def shadow(self) -> None:
        """Takes part in a backward of the other ranks, with gradients that were added up before or else with zeros, and
        gets the averages."""
        self.check()
        self._buckets.places.begin()
        rest = [self._is_rest(index) for index in range(len(self.names))]
        self._used = [False] * len(self.names)
        for index, is_there in enumerate(rest):
            if is_there:
                self._buckets.bring(index)
            else:
                self._buckets.bring_zeros(index)
        self._take(self._buckets.synchronize([it or not self.has_marks for it in rest]))
        self.steps += 1
        self._after_step()

    # Callbacks of backward.

    def _on_outputs(self, forward: _Forward, _gradients: Any) -> None:
        with self._lock:
            backward = self._begin()
            backward.is_local, backward.by_outputs = False, True
            if not _keeps_graph():
                backward.forwards.append(forward)
            elif self._forwards is not None and forward not in self._forwards:
                self._forwards.append(forward)
            early, backward.early = backward.early, []
            for index in early:
                self._have_gradient(index)

    def _on_local_outputs(self, _gradients: Any) -> None:
        with self._lock:
            if self._backward is None:
                self._begin().is_local = True

    def _begin(self) -> _Backward:
        """Asks autograd to call at the end of the running backward, the outermost one if nested."""
        if self._backward is None:
            self._backward = _Backward()
            self.times.mark("backward")
            # No other reference: the callback must be dropped when backward drops it.
            torch.autograd.Variable._execution_engine.queue_callback(End(self._on_end, self._on_failure))
        return self._backward

    def _on_gradient(self, index: int, _parameter: Any) -> None:
        # Autograd has a thread for each GPU.
        with self._lock:
            self._have_gradient(index)

    def _have_gradient(self, index: int) -> None:
        self._used[index] = True
        if self._backward is None:
            if not self._is_awaited(index):
                self._stays_here(index)
                return
            # Its outputs, if it comes by some, have been passed before.
            self._begin().by_outputs = False
        backward = self._begin()
        if backward.is_local:
            backward.early.append(index)
            return
        step = self._step
        if step is None:
            step = self._begin_step(index)
        step.came[index] += 1
        step.due[index] -= 1
        if step.due[index] == 0:
            step.is_brought[index] = True
            self._buckets.bring(index)
        elif step.is_brought[index]:
            raise RuntimeError(self._too_often(index))

    def _is_awaited(self, index: int) -> bool:
        """Whether a gradient that comes by no outputs is to be averaged."""
        if not self._by_forward or not self.sync_grad:
            return self.sync_grad
        return any(forward.awaits(index) for forward in self._forwards or ())

    def _stays_here(self, index: int) -> None:
        """A gradient that belongs to no forward of the wrapper is this rank's alone."""
        parameter = self.parameters[index]
        others = (it for other in _living if other is not self for it in other.parameters)
        if not self._is_of_several() or any(it is parameter for it in others):
            return
        which = f"parameter {self.names[index]} got a gradient that is not averaged"
        how = "run this backward under no_sync() of the wrapper if that is meant"
        if self._forwards is None:
            raise RuntimeError(
                f"{which}: forward of the wrapper has never been called, only the module inside. Call the wrapper, or "
                f"{how}"
            )
        self._warn(
            0,
            f"{which}: it belongs to no forward of the wrapper. Call the wrapper and not the module inside, or {how}",
        )

    def _is_of_several(self) -> bool:
        """Whether gradients of this process would be averaged with others."""
        return self.sync_grad and self.group.world_size > 1 and os.getpid() == self._process

    def _warn(self, kind: int, text: str) -> None:
        if not self._has_warned[kind]:
            self._has_warned[kind] = True
            warnings.warn(text, stacklevel=2)

    def _look_for_taken(self) -> None:
        """Warns of gradients that a backward has given to the program, and not to parameters."""
        if self._has_warned[1] or not self._is_of_several():
            return
        for name, parameter in zip(self.names, self.parameters, strict=True):
            if parameter.requires_grad and _is_taken(parameter):
                self._warn(
                    1,
                    f"torch.autograd.grad has returned this rank's own gradient of parameter {name}: it is not averaged. "
                    "Use backward(), which averages what comes to p.grad, or average it",
                )
                return

    def _begin_step(self, index: int) -> _Step:
        self.check()
        self.times.mark("gradient")
        if self._calls is not None and self._calls[index] == 0:
            raise RuntimeError(self._too_often(index))
        step = self._step = _Step(len(self.names), self._calls)
        step.event = profile.begin("all_reduce", self.parameters)
        self._buckets.places.begin()
        if self._calls is not None:
            idle = [i for i, calls in enumerate(self._calls) if calls == 0]
            for unused in {*self._unreached, *idle}:
                step.due[unused] = 0
                self._bring_unused(step, unused)
        return step

    def _bring_unused(self, step: _Step, index: int) -> None:
        """Brings what was accumulated before, or zeros. The parameter keeps that if no rank uses it."""
        if self.parameters[index].grad is None:
            self._used[index] = False
        elif not self._used[index]:
            self._buckets.places.lift(index)
        step.is_brought[index] = True
        self._buckets.bring(index)

    def _on_end(self) -> None:
        """Backward has ended without an error."""
        backward, self._backward = self._backward, None
        if backward is None:
            return
        self._forget_forwards(backward)
        if self._step is None and not backward.is_local:
            self._look_for_taken()
        if self._step is not None:
            self._step.by_outputs = backward.by_outputs
            if self.sync_backward:
                self._finish(self._step)

    def _forget_forwards(self, backward: _Backward) -> None:
        """Those whose graph was freed give no more gradients, but to parameters that have got none."""
        forwards, step = self._forwards, self._step
        if not forwards:
            return
        if step is not None and not backward.by_outputs and not backward.keeps_graph:
            backward.forwards.append(forwards[0])
        for forward in dict.fromkeys(backward.forwards):
            if step is not None:
                lacking = range(len(step.came)) if forward.lacking is None else forward.lacking
                forward.lacking = {index for index in lacking if step.came[index] == 0}
            if (step is None or not forward.lacking) and forward in forwards:
                forwards.remove(forward)

    def _on_failure(self) -> None:
        """Backward has raised."""
        self._backward = None
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
            raise _core.NotBroughtError(f"backward, {error}. {self._unused_text(step)}") from None
        except _core.CollectiveError as error:
            text = f"backward, {error}. Look at what the ranks that are named here have printed"
            told = type(error)(text)
            told.cause, told.culprit = error.cause, error.culprit
            raise told from None
        if self._calls is None:
            self._calls = step.came
        self._take(used_anywhere)
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
        gradients = self._buckets.places.take(
            [index for index, is_used in enumerate(used) if is_used]
        )
        unused = (it for it, is_used in zip(self.parameters, used, strict=True) if not is_used)
        self.unused_bytes = sum(it.nbytes for it in unused) if self.has_marks else 0
        if gradients and self.scale is not None and self._buckets.averages:
            with torch.no_grad():
                torch._foreach_mul_(gradients, self.scale)

    def _too_often(self, index: int) -> str:
        name = self.names[index]
        if index in self._unreached:
            return (
                f"parameter {name} got a gradient, but the outputs of forward do not lead to it. With "
                "checkpoint(use_reentrant=True), find_unused_parameters cannot see what is used"
            )
        if self._is_static:
            expected = self._calls[index] if self._calls is not None else 0
            return (
                f"parameter {name} got more gradients in this backward than in the first one, which gave it {expected}: "
                f"the graph is not static. {_NOT_STATIC}"
            )
        return (
            f"parameter {name} got more gradients in one backward than expected: it is used in several "
            "reentrant backward passes. Use checkpoint(use_reentrant=False), or static_graph=True"
        )

    def _unused_text(self, step: _Step) -> str:
        if self._is_static:
            return (
                "A parameter without a gradient got one in the first backward: the graph is not static. "
                f"{_NOT_STATIC}"
            )
        if step.by_outputs:
            return _UNUSED
        return (
            f"{_UNUSED}. This backward went through no output of the wrapper's forward: if it concerns only some of the "
            "parameters, such as a penalty on weights, add it to the loss, or run it under no_sync()"
        )


_UNUSED = (
    "A parameter without a gradient has not taken part in the loss: pass find_unused_parameters=True "
    "if that may be so"
)
_NOT_STATIC = (
    "With static_graph=True every backward uses the parameters that the first one used, as often. Wrap the module "
    "without it, and with find_unused_parameters=True"
)


# Older torch tells only whether the graph of derivatives is made, which keeps the other one, too.
_AUTOGRAD = getattr(torch._C, "_autograd", None)


_living: weakref.WeakSet[Reducer] = weakref.WeakSet()


class _Forward:
    """A forward whose gradients are averaged."""

    def __init__(self, version: int) -> None:
        self.version = version
        """How often parameters had been changed."""
        self.lacking: set[int] | None = None
        """The parameters that have got none so far. None: all."""

    def awaits(self, index: int) -> bool:
        """Whether a gradient of this parameter may come."""
        return self.lacking is None or index in self.lacking


class _Backward:
    """A backward that runs."""

    def __init__(self) -> None:
        # Whether it has come only by outputs of a forward that was not expected, and its gradients so far.
        self.is_local = False
        self.early: list[int] = []
        # Whether it was seen to go through outputs of a forward, before it brought a gradient.
        self.by_outputs = True
        self.keeps_graph = _keeps_graph()
        # Those whose outputs it has passed, and whose graph it frees.
        self.forwards: list[_Forward] = []


def _is_taken(parameter: Any) -> bool:
    """Whether the running backward was asked for the gradient of this parameter, by torch.autograd.grad."""
    with torch.enable_grad():
        node = torch.autograd.graph.get_gradient_edge(parameter).node
    try:
        torch._C._will_engine_execute_node(node)
    except RuntimeError:  # torch tells nothing else of such a node
        return True
    return False


def _keeps_graph() -> bool:
    """Whether the running backward leaves its graph to a later one."""
    tells = getattr(_AUTOGRAD, "_get_current_graph_task_keep_graph", torch.is_grad_enabled)
    return bool(tells())


class _Step:
    """A backward whose gradients are averaged."""

    def __init__(self, count: int, calls: list[int] | None) -> None:
        self.came = [0] * count
        self.due = [-1] * count if calls is None else list(calls)
        self.is_brought = [False] * count
        self.by_outputs = True
        # From the first gradient to the last average. Buckets are the core's affair.
        self.event: profile.Event | None = None


def _dispose(handles: list[Any], buckets: list[Buckets]) -> None:
    for handle in handles:
        handle.remove()
    for bucket in buckets:
        bucket.drop()
