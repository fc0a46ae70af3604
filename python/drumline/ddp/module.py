"""`DistributedDataParallel`, the module around a module."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch.distributed.algorithms.join import Join, Joinable

from drumline.ddp import states
from drumline.ddp.arguments import check_parameters, delayed_names, place
from drumline.ddp.autograd import calling, untraced
from drumline.ddp.device_buckets import Devices, broadcast
from drumline.ddp.debug import Debug
from drumline.ddp.graph import moved
from drumline.ddp.groups import core_group, group_of, is_default
from drumline.ddp.hooks import Compress, buckets_for
from drumline.ddp.join import Has, Joined, Joining
from drumline.ddp.power_sgd import power_sgd
from drumline.ddp.precision import Precision
from drumline.ddp.reducer import Reducer
from drumline.ddp.shards import Shards, Start
from drumline.ddp.sync_batch_norm import is_synchronised
from drumline.ddp.torch_methods import TorchMethods, refuse_optimizers_in_backward
from drumline.elastic import ElasticGroup
from drumline.groups import ProcessGroup

_DEFAULT_BUCKET_BYTES = 4 << 20


class DistributedDataParallel(torch.nn.Module, TorchMethods):
    """Trains the same module on all ranks, each on its own share of the data.

    Like torch's class of this name, but on `AsyncReduce` of drumline's core: gradients are averaged in
    memory that the ranks of a host share, while backward runs. After backward all
    ranks have the same gradients, bit by bit. So equal optimizers keep equal parameters equal. Autocast,
    GradScaler, clipping, accumulation and schedulers work as on one device.

    Construction is a collective: all ranks' parameters and buffers are compared (DrumlineError names
    the first that differs, and the rank, on every rank), then all take those of rank 0. A backward
    of a `forward` ends when all gradients are averaged, also if it does not go through what `forward` has
    returned. It raises, on every
    rank, NotBroughtError with the parameters that got no gradient somewhere, or CollectiveError with
    the rank at fault. In the second step, ranks compare the parameters that the first one has left.

    Args (in torch's order, with torch's meaning where nothing is said):
        module: on the CPU or anywhere else; gradients of other devices are staged.
        device_ids: at most one GPU. The module and its inputs are moved there. On a machine without
            GPUs it means the CPU, with a warning. None for modules on several devices.
        output_device, dim, check_reduction: accepted and ignored.
        broadcast_buffers: rank 0's buffers for all at the beginning, before each forward while gradients are
            enabled, and for the evaluation that follows. None, as True.
        init_sync: compare ranks, and take rank 0's values. Without, parameters are not compared after
            the first step either, unless ``check_every`` is set.
        process_group: drumline's, or torch's of any backend; None for that of the whole job.
        bucket_cap_mb: gradients shorter than this (in MiB) share buckets of this length. 4 unless set.
        find_unused_parameters: a parameter that only some ranks use is averaged with zeros; one that
            no rank uses keeps its gradient.
        gradient_as_bucket_view: gradients lie in the memory in which they are averaged, which saves a
            copy; a gradient that the program keeps is overwritten by the next backward.
        static_graph: the same parameters are used in every backward, equally often.
        delay_all_reduce_named_params, param_to_hook_all_reduce: both or none. These parameters are
            averaged when they are ready, like all others.
        mixed_precision: torch's ``_MixedPrecision``. Forward and backward run on casts of parameters and
            inputs; parameters and gradients keep their type.
        device_mesh: of one dimension, in the place of a process group.
        bucket_cap_mb_list: the largest number counts.
        skip_all_reduce_unused_params, batched_grad_copy, lazy_bucket_allocation: accepted and ignored.
        forward_sync_buffers: rank 0's buffers before each forward, as ``broadcast_buffers``, which it
            replaces; at the beginning they are rank 0's in any case.
        check_every: drumline's own: after how many steps the parameters of all ranks are compared, bit by bit.
            DrumlineError on every rank names the first that differs, and the rank. 0 or None: after the first
            step only, and not with a communication hook of the program.
        shards: drumline's own: a step is so many shards, whatever the number of ranks, and `step` runs it.
        seed: from which the random numbers of shards follow.

    Example::

        model = drumline.DistributedDataParallel(model)
        for x, y in loader:
            optimizer.zero_grad()
            loss(model(x), y).backward()
            optimizer.step()
    """

    # Of a copy that is not connected yet: `sync_grad` and `sync_backward` of its reducer.
    _syncs: tuple[bool, bool] = (True, True)
    _reducer: Reducer | None = None

    def __init__(
        self,
        module: torch.nn.Module,
        device_ids: Sequence[Any] | None = None,
        output_device: Any = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: Any = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: Iterable[tuple[str, Any]] | None = None,
        param_to_hook_all_reduce: Any = None,
        mixed_precision: Any = None,
        device_mesh: Any = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: Sequence[float] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        lazy_bucket_allocation: bool = False,
        check_every: int | None = 0,
        shards: int | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        Joinable.__init__(self)
        check_parameters(module)
        delayed = delayed_names(module, delay_all_reduce_named_params, param_to_hook_all_reduce)
        group = group_of(process_group, device_mesh)
        if device_mesh is not None:
            self.device_mesh = device_mesh
        device = place(module, device_ids)
        self.module = module
        self.device_ids = None if device is None else [device]
        self.device = device or next(module.parameters()).device
        self.device_type = self.device.type
        self.is_multi_device_module = len({it.device for it in module.parameters()}) > 1
        self.output_device, self.dim = output_device or device, dim
        self._shares_buffers = forward_sync_buffers is not None or broadcast_buffers is not False
        self.forward_sync_buffers = (
            self._shares_buffers if forward_sync_buffers is None else forward_sync_buffers
        )
        self.find_unused_parameters, self.static_graph = find_unused_parameters, static_graph
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.mixed_precision, self._precision = mixed_precision, Precision.like_torch(mixed_precision)
        cap_mb = max(bucket_cap_mb_list) if bucket_cap_mb_list else bucket_cap_mb
        if cap_mb is not None and cap_mb < 0:
            raise ValueError(f"bucket_cap_mb is at least 0, and this is {cap_mb}")
        self.bucket_bytes = _DEFAULT_BUCKET_BYTES if cap_mb is None else int(cap_mb * (1 << 20))
        self.parameters_to_ignore = (
            set(getattr(module, "_ddp_params_and_buffers_to_ignore", ())) - delayed
        )
        self.check_every = check_every or 0
        if self.check_every < 0:
            raise ValueError(f"check_every is a number of steps, and this is {check_every}")
        self._compares_first = init_sync
        self.shards, self.seed = shards, seed
        self._buffer_hook = None
        self._after_forward_buffers = states.AfterForward()
        self._precision.cast_buffers(self._buffers_in_use().values())
        self._connect(group, init_sync)

    def _connect(self, process_group: Any, init_sync: bool, elastic: ElasticGroup | None = None) -> Reducer:
        self.process_group, self._is_on_default_group = process_group, is_default(process_group)
        self._group = core_group(process_group)
        self._joined: Joined | None = None
        self._has_joined, self._has_begun, self._hook_name = False, False, ""
        parameters = self._parameters_in_use()
        buffers = self._buffers_in_use() if self._shares_buffers else {}
        if init_sync:
            ignores_unused = self.find_unused_parameters or self.static_graph
            shards = None if self.shards is None else (self.shards, self.seed)
            states.verify(self._group, parameters, buffers, self.bucket_bytes, ignores_unused, shards)
        trained = {name: it for name, it in parameters.items() if it.requires_grad}
        self._shards: Shards | None = None
        if self.shards is not None:
            unused = self.find_unused_parameters
            self._shards = Shards(self._group, self.shards, self.seed, self.module, trained, unused)
            may_go_on = self._is_on_default_group or isinstance(process_group, ProcessGroup)
            if elastic is None and may_go_on:
                elastic = ElasticGroup(process_group)
        self._elastic = elastic
        tensors = [*parameters.values(), *self._buffers_in_use().values()]
        self._devices = Devices(self._group, tensors)
        if init_sync:
            self._broadcast([*parameters.values(), *buffers.values()])
        if self._reducer is not None:  # on a group that may have failed
            self._reducer.drop()
        self._reducer = None
        reducer = self._reducer = Reducer(
            self._group,
            trained,
            bucket_bytes=self.bucket_bytes,
            find_unused=self.find_unused_parameters,
            static_graph=self.static_graph,
            by_forward=True,
            wire=self._precision.reduction,
            after_step=calling(self, "_end_step"),
            devices=self._devices,
            views=self.gradient_as_bucket_view,
        )
        self._layout = states.Layout(self.module, self.parameters_to_ignore)
        self._comparison = states.Comparison(
            self._group,
            calling(self, "_parameters_in_use"),
            self._compares_first,
            self.check_every,
        )
        self._debug = Debug(self._group.debug)
        self._debug.begin(self)
        return reducer

    @property
    def reducer(self) -> Reducer:
        """What averages the gradients. A collective for the first call of a copy, which `forward` makes in training."""
        if self._reducer is not None:
            return self._reducer
        reducer = self._connect(group_of(None), init_sync=False)
        reducer.sync_grad, reducer.sync_backward = self._syncs
        return reducer

    def _end_step(self) -> None:
        self._comparison.end_step(self.reducer.steps)
        self._debug.end_step(self)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The module's forward; buffers first, if gradients are enabled."""
        # The name by which torch's profiler knows a forward of its own class.
        with torch.autograd.profiler.record_function("DistributedDataParallel.forward"):
            return self._forward(inputs, kwargs)

    def _forward(self, inputs: Any, kwargs: Any) -> Any:
        # A copy that is not trained needs no other rank.
        is_training = torch.is_grad_enabled() and (self._reducer is not None or self._is_trained())
        if is_training:
            begun = self._before_forward()
        else:
            begun = None
            self._before_evaluation()
        if self.device_ids:
            [device] = self.device_ids
            inputs, kwargs = moved(inputs, device), moved(kwargs, device)
        if self.mixed_precision is None:
            outputs = self.module(*inputs, **kwargs)
        else:
            parameters = self._parameters_in_use()
            outputs = self._precision.call(self.module, parameters, inputs, kwargs)
        if is_training:
            self._after_forward(begun, outputs)
        return outputs

    @untraced
    def _before_evaluation(self) -> None:
        self._after_forward_buffers.take(self._buffers_in_use)

    def _is_trained(self) -> bool:
        return any(it.requires_grad for it in self._parameters_in_use().values())

    @untraced
    def _before_forward(self) -> Any:
        """The forward that begins, for the reducer. None: its backward is not averaged."""
        if self.reducer.sync_grad:
            self.reducer.check()
            self._refuse_beside_shards("a forward outside of `step`")
        self._layout.check()
        if not self._has_begun:
            refuse_optimizers_in_backward(self._parameters_in_use())
            self._has_begun = True
        joined = self._active_join
        if joined is not None:
            work = Join.notify_join_context(self)
            if work is not None:
                work.wait()
            joined.begin_forward(self._has())
        self._after_forward_buffers.drop()
        buffers = self._buffers_to_sync()
        if buffers and (self._buffer_hook is None or self._buffer_hook[2]):
            self._sync_buffers(buffers)
        self.reducer.times.mark("forward")
        if not self.reducer.sync_grad:
            return None
        self._comparison.before_forward(self.reducer.steps)
        return self.reducer.begin_forward()

    @untraced
    def _after_forward(self, begun: Any, outputs: Any) -> None:
        if begun is None:
            self.reducer.expect_nothing(outputs)
            return
        buffers = self._buffers_to_sync()
        if buffers:
            self._after_training(buffers)
        self.reducer.expect(begun, outputs)

    def _after_training(self, buffers: dict[str, Any]) -> None:
        if self._buffer_hook is not None:
            if not self._buffer_hook[2]:
                self._sync_buffers(buffers)
        # Ranks that are joined end with equal buffers.
        elif self._active_join is None and self._group.world_size > 1:
            self._after_forward_buffers.receive(buffers, self._group.rank == 0, self._broadcast)

    @property
    def _active_join(self) -> Joined | None:
        return self._joined if self._join_config.enable else None

    def _has(self) -> Has:
        """What the next forward is going to do."""
        has = Has.GRADIENTS if self.reducer.sync_grad else Has(0)
        if self.will_sync_module_buffers():
            has |= Has.BUFFERS
        if any(is_synchronised(it) for it in self.module.modules()):
            has |= Has.STATISTICS
        return has

    def _parameters_in_use(self) -> dict[str, Any]:
        return states.parameters_of(self.module, self.parameters_to_ignore)

    def _buffers_in_use(self) -> dict[str, Any]:
        return states.buffers_of(self.module, self.parameters_to_ignore)

    def _buffers_to_sync(self) -> dict[str, Any]:
        return self._buffers_in_use() if self._syncs_buffers() else {}

    def _sync_buffers(self, buffers: dict[str, Any]) -> None:
        if self._buffer_hook is None:
            joined = self._active_join
            source = 0 if joined is None else joined.last_active
            self._broadcast(list(buffers.values()), source)
            return
        hook, state, _ = self._buffer_hook
        for future in hook(state, buffers) or ():
            future.wait()

    def _broadcast(self, tensors: list[Any], source: int = 0) -> None:
        others = broadcast(self._devices, tensors, source)
        if others:
            states.broadcast(self._group, others, source)

    def step(self, number: int, loss: Callable[[int], Any]) -> float:
        """Runs step ``number`` of a training whose steps are shards, and returns the average of their losses. ``loss(shard)``
        computes that of a shard, through this wrapper; it is called once for each shard that this rank has, and backward
        runs inside. Then ``grad`` of each parameter is the average over all shards: the same bits on 1, 2, ... ranks, as
        long as ``loss`` depends on ``number`` and the shard alone, and each process computes with equally many threads.

        Each shard begins with generators (of torch, numpy, ``random``) of its own, which follow from ``seed``, ``number`` and
        the shard. Afterwards they are as before. Buffers become those of shard 0, on all ranks.

        Raises what ``loss`` raises; then DrumlineError on the other ranks, with the rank. NotBroughtError on all ranks, with
        the parameters that a shard has not used.

        If a rank dies, the others deal its shards to themselves and run the step again: see `drumline.ElasticGroup`. So
        ``loss`` may be called again for a shard. In a group of some ranks, a death ends the job.

        Example::

            model = drumline.DistributedDataParallel(model, shards=8)
            for number in range(steps):
                loss = model.step(number, lambda shard: criterion(model(x(number, shard)), y(number, shard)))
                optimizer.step()
        """
        steps = self.reducer.steps
        if self._shards is None:
            raise RuntimeError("step runs the shards of a step: wrap the module with DistributedDataParallel(..., shards=8)")
        self.reducer.check()
        start = self._shards.start(list(self._buffers_in_use().values()))
        piece = functools.partial(self._piece, number, loss, start, steps, self._comparison.is_due)
        syncs = self.reducer.sync_grad
        try:
            average = piece(self.process_group) if self._elastic is None else self._elastic.run(piece)
        except BaseException:
            start.restore()
            raise
        finally:
            if self._reducer is not None:  # a death may have come while it was made
                self._reducer.sync_grad = syncs
        self.reducer.steps = steps + 1
        self._debug.end_step(self)
        return average

    def _piece(
        self, number: int, loss: Callable[[int], Any], start: Start, steps: int, is_due: bool, group: Any
    ) -> float:
        """A step of shards, on a group that may be what is left of the one of before. ``steps`` were made before it, and
        ``is_due`` says whether parameters are to be compared."""
        if core_group(group) is not self._group:
            self._connect(group, init_sync=False, elastic=self._elastic)
            self.reducer.steps, self._comparison.is_due = steps, is_due
        assert self._shards is not None
        self.reducer.sync_grad = False
        self._comparison.before_forward(steps)
        average = self._shards.step(number, loss, start)
        if start.buffers and self._shares_buffers and self._group.world_size > 1:
            self._broadcast(list(start.buffers))
        self._comparison.end_step(steps + 1)
        return average

    @property
    def elastic(self) -> ElasticGroup | None:
        """What goes on when a rank has died: each `step` is a piece of it. Hand in what else the ranks do together. None
        without ``shards``, and on a group of torch's that has some ranks of the job."""
        return self._elastic

    def _refuse_beside_shards(self, what: str) -> None:
        if self._shards is not None:
            raise RuntimeError(f"this module is wrapped with shards={self.shards}: {what} has no place beside `step`")

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Forward and backward in here add gradients up on this rank; neither gradients nor buffers
        travel. The next backward averages the sum."""
        reducer = self.reducer
        self._refuse_beside_shards("no_sync")
        before, reducer.sync_grad = reducer.sync_grad, False
        try:
            yield
        finally:
            reducer.sync_grad = before

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> AbstractContextManager[None]:
        """For ranks with different numbers of batches: one that has none left takes part in what the
        others do, with zeros, until all have ended. Then all take the parameters and buffers of the
        rank that went on longest.

        Averages are over all ranks, or, without ``divide_by_initial_world_size``, over those that
        have data. ``throw_on_early_termination``: RuntimeError on all ranks when the first has ended.

        torch's `Join([model, optimizer])` does the same for several at once.
        """
        if not enable:
            return nullcontext()

        def begin() -> Joined:
            joined = self._join(divide_by_initial_world_size, throw_on_early_termination)
            # Nobody else counts the ranks.
            self._join_config = self._join_config._replace(enable=True, is_first_joinable=False)
            return joined

        return Joining(begin, self._leave_join)

    def join_hook(self, **kwargs: Any) -> Joined:
        """The hook that torch's `Join` calls on a rank without data. Takes ``divide_by_initial_world_size``."""
        _ = self.join_process_group  # raises if `Join` cannot count ranks in it
        return self._join(kwargs.get("divide_by_initial_world_size", True), throw=False)

    def _join(self, divide_by_initial: bool, throw: bool) -> Joined:
        self._refuse_beside_shards("join")
        self._has_joined = True
        reducer = self.reducer
        self._joined = Joined(
            self._group, reducer, self._shadow_buffers, self._end_join, divide_by_initial, throw
        )
        return self._joined

    def _shadow_buffers(self) -> None:
        self._sync_buffers(self._buffers_in_use())

    def _end_join(self, root: int) -> None:
        buffers = self._buffers_in_use() if self.forward_sync_buffers else {}
        tensors = [*self._parameters_in_use().values(), *buffers.values()]
        states.broadcast(self._group, tensors, root)
        self._leave_join()

    def _leave_join(self) -> None:
        self._joined, self.reducer.scale = None, None
        self._join_config = self._join_config._replace(enable=False)

    def register_comm_hook(self, state: object, hook: Callable[..., Any] | Compress) -> None:
        """Replaces the averaging of gradients. A collective, between two steps. RuntimeError the second time.

        ``hook`` is `drumline.ddp.fp16_compress` or ``bf16_compress`` (gradients travel in half of
        their bytes, inside of the core), or ``hook(state, bucket)``, which returns a Future with the
        reduced ``bucket.buffer()``, as torch has it: it is called for one bucket after the other, in the
        same order on all ranks.
        """
        self._refuse_beside_shards("a communication hook")
        if self._hook_name:
            raise RuntimeError(f"this model has the communication hook {self._hook_name} already, and it stays")
        make = buckets_for(self.reducer, state, hook)
        if make is not None:
            self.reducer.replace_buckets(make)
        if isinstance(hook, Compress):
            self._hook_name = hook.name
        else:
            if make is not None and hook is not power_sgd:
                # It may leave ranks different, as hooks for local steps do.
                self._comparison.compares_first = False
            self._hook_name = getattr(hook, "__name__", str(hook))

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(
        module: torch.nn.Module, names: Iterable[str]
    ) -> None:
        """These are neither compared nor sent."""
        object.__setattr__(module, "_ddp_params_and_buffers_to_ignore", list(names))

    def _apply(self, fn: Callable[[Any], Any], recurse: bool = True) -> Any:
        # Moves and casts would hide that buffers are as they were.
        self._after_forward_buffers.take(self._buffers_in_use)
        return super()._apply(fn, recurse)

    def __getstate__(self) -> dict[str, Any]:
        if not self._is_on_default_group:
            raise RuntimeError(
                "a wrapper is copied or pickled only if it is on the group of the whole job, on which its copy will be: copy "
                "model.module, and wrap that"
            )
        self._after_forward_buffers.take(self._buffers_in_use)
        state = self.__dict__.copy()
        if self._reducer is not None:
            state["_syncs"] = self._reducer.sync_grad, self._reducer.sync_backward
        for name in (
            "process_group", "_group", "_devices", "_reducer", "_joined", "_layout", "_comparison", "_shards",
            "_elastic",
        ):  # fmt: skip
            state.pop(name, None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Sends nothing. The first forward in training connects the copies of all ranks, on the group of the whole
        job."""
        super().__setstate__(state)
        self._reducer = self._joined = self.process_group = self._shards = self._elastic = None
        with suppress(RuntimeError):  # to be evaluated, a copy needs none
            self.process_group = group_of(None)
