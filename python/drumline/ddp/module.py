"""`DistributedDataParallel`, the module around a module."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._utils import _get_device_index

from drumline.ddp import states
from drumline.ddp.graph import moved
from drumline.ddp.groups import core_group
from drumline.ddp.hooks import Compress, buckets_for
from drumline.ddp.join import Joined
from drumline.ddp.reducer import Reducer

_DEFAULT_BUCKET_BYTES = 4 << 20


class DistributedDataParallel(torch.nn.Module):
    """Trains the same module on all ranks, each on its own share of the data.

    What torch's class of this name does, on `AsyncReduce` of drumline's core: gradients are views into
    memory that the ranks of a host share, and are averaged there while backward goes on. After
    backward all ranks have the same gradients, bit by bit; so equal optimizers keep equal parameters
    equal. Autocast, GradScaler, clipping, accumulation and schedulers work as on one device.

    Construction is a collective: all ranks' parameters and buffers are compared (DrumlineError names
    the first that differs, and the rank, on every rank), then all take those of rank 0. A backward
    that goes through the outputs of `forward` ends when all gradients are averaged. It raises, on every
    rank, NotBroughtError with the parameters that got no gradient somewhere, or CollectiveError with
    the rank at fault.

    Args (in torch's order, with torch's meaning where nothing is said):
        module: on the CPU or anywhere else; gradients of other devices are staged.
        device_ids: at most one GPU. The module and its inputs are moved there. On a machine without
            GPUs it means the CPU, with a warning. None for modules on several devices.
        output_device, dim, check_reduction: taken and not needed.
        broadcast_buffers: rank 0's buffers for all before each forward, while gradients are enabled.
        init_sync: compare ranks, and take rank 0's values.
        process_group: drumline's, or torch's of any backend; None for that of the whole job.
        bucket_cap_mb: gradients shorter than so many MiB share buckets of that length. 4 unless set.
        find_unused_parameters: a parameter that only some ranks use is averaged with zeros; one that
            nobody uses keeps its gradient.
        gradient_as_bucket_view: gradients are views in any case.
        static_graph: the same parameters are used in every backward, equally often.

    Example::

        model = drumline.DistributedDataParallel(model)
        for x, y in loader:
            optimizer.zero_grad()
            loss(model(x), y).backward()
            optimizer.step()
    """

    def __init__(
        self,
        module: torch.nn.Module,
        device_ids: Sequence[Any] | None = None,
        output_device: Any = None,
        dim: int = 0,
        broadcast_buffers: bool = True,
        init_sync: bool = True,
        process_group: Any = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
    ) -> None:
        super().__init__()
        check_parameters(module)
        device = place(module, device_ids)
        self.module = module
        self.device_ids = None if device is None else [device]
        self.device = device or next(module.parameters()).device
        self.output_device, self.dim = output_device or device, dim
        self.broadcast_buffers = broadcast_buffers
        self.find_unused_parameters, self.static_graph = find_unused_parameters, static_graph
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.bucket_bytes = (
            _DEFAULT_BUCKET_BYTES if bucket_cap_mb is None else int(bucket_cap_mb * (1 << 20))
        )
        self.parameters_to_ignore = list(
            getattr(module, "_ddp_params_and_buffers_to_ignore", [])
        )
        self._connect(process_group, init_sync)

    def _connect(self, process_group: Any, init_sync: bool) -> None:
        self.process_group = process_group
        self._group = core_group(process_group)
        self._joined: Joined | None = None
        parameters = states.parameters_of(self.module, self.parameters_to_ignore)
        if init_sync:
            buffers = states.buffers_of(self.module, self.parameters_to_ignore)
            ignores_unused = self.find_unused_parameters or self.static_graph
            states.verify(self._group, parameters, buffers, self.bucket_bytes, ignores_unused)
            states.broadcast(self._group, self._tensors())
        self.reducer = Reducer(
            self._group,
            {name: it for name, it in parameters.items() if it.requires_grad},
            bucket_bytes=self.bucket_bytes,
            find_unused=self.find_unused_parameters,
            static_graph=self.static_graph,
            by_forward=True,
        )

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The module's forward; buffers first, if gradients are enabled."""
        is_training = torch.is_grad_enabled()
        if is_training:
            if self.reducer.sync_grad:
                self.reducer.check()
            if self._joined is not None:
                self._joined.begin_forward(self.reducer.sync_grad)
            if self.broadcast_buffers:
                self._sync_buffers()
        if self.device_ids:
            inputs, kwargs = moved(inputs, self.device), moved(kwargs, self.device)
        outputs = self.module(*inputs, **kwargs)
        if is_training:
            if self.reducer.sync_grad:
                self.reducer.expect(outputs)
                if self.find_unused_parameters:
                    self.reducer.filter_unused_parameters(outputs)
            else:
                self.reducer.expect_nothing()
        return outputs

    def _tensors(self) -> list[Any]:
        """All parameters and buffers that ranks have in common."""
        parameters = states.parameters_of(self.module, self.parameters_to_ignore)
        buffers = states.buffers_of(self.module, self.parameters_to_ignore)
        return [*parameters.values(), *buffers.values()]

    def _sync_buffers(self) -> None:
        buffers = states.buffers_of(self.module, self.parameters_to_ignore)
        if buffers:
            source = 0 if self._joined is None else self._joined.first_active
            states.broadcast(self._group, buffers.values(), source)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Forward and backward in here add gradients up on this rank; neither gradients nor buffers
        travel. The next backward averages the sum."""
        before = self.reducer.sync_grad, self.broadcast_buffers
        self.reducer.sync_grad = self.broadcast_buffers = False
        try:
            yield
        finally:
            self.reducer.sync_grad, self.broadcast_buffers = before

    @property
    def require_backward_grad_sync(self) -> bool:
        """torch's name of ``reducer.sync_grad``."""
        return self.reducer.sync_grad

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        self.reducer.sync_grad = value

    @contextmanager
    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Iterator[None]:
        """For ranks with different numbers of batches: one that has none left takes part in what the
        others do, with zeros, until all have ended. Then all take the parameters and buffers of the
        rank that went on longest.

        Averages are over all ranks, or, without ``divide_by_initial_world_size``, over those that
        have data. ``throw_on_early_termination``: RuntimeError on all ranks when the first has ended.
        """
        if not enable:
            yield
            return
        self._joined = Joined(
            self._group, self.reducer, divide_by_initial_world_size, throw_on_early_termination
        )
        try:
            yield
            self._joined.shadow(
                lambda: self._sync_buffers() if self.broadcast_buffers else None,
                lambda root: states.broadcast(self._group, self._tensors(), root),
            )
        finally:
            self._joined = None

    def register_comm_hook(self, state: object, hook: Callable[..., Any] | Compress) -> None:
        """Replaces the averaging of gradients. A collective, once, before the first backward.

        ``hook`` is `drumline.ddp.fp16_compress` or ``bf16_compress`` (gradients travel in half of
        their bytes, inside of the core), or ``hook(state, bucket)``, which returns a Future with the
        reduced ``bucket.buffer()``, as torch has it: it is called for one bucket after the other, in the
        same order on all ranks.
        """
        make = buckets_for(self.reducer, self.bucket_bytes, state, hook)
        if make is not None:
            self.reducer.replace_buckets(make)

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(
        module: torch.nn.Module, names: Iterable[str]
    ) -> None:
        """These are neither compared nor sent."""
        object.__setattr__(module, "_ddp_params_and_buffers_to_ignore", list(names))

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        for name in ("process_group", "_group", "reducer", "_joined"):
            del state[name]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """On the group of the whole job; a collective."""
        super().__setstate__(state)
        self._connect(None, init_sync=True)


def check_parameters(module: torch.nn.Module) -> None:
    """Raises where there is nothing to train, or no memory for it yet."""
    parameters = list(module.parameters())
    for parameter in parameters:
        if isinstance(parameter, torch.nn.parameter.UninitializedParameter):
            raise TypeError(
                "torch.nn.parameter.UninitializedParameter is not supported: run a batch through "
                "lazy modules first"
            )
    if not any(parameter.requires_grad for parameter in parameters):
        raise RuntimeError(
            "DistributedDataParallel is not needed when a module doesn't have any parameters that "
            "require a gradient"
        )


def place(module: torch.nn.Module, device_ids: Sequence[Any] | None) -> Any:
    """The one device of the module, where it is moved to. None: the module stays where it is."""
    if not device_ids:
        return None
    if len(device_ids) > 1:
        raise ValueError("device_ids can only be None or contain a single element.")
    if not isinstance(device_ids[0], int) and torch.device(device_ids[0]).type == "cpu":
        return None
    if not torch.cuda.is_available():
        _say_once(f"device_ids={list(device_ids)} means the CPU: this machine has no GPU")
        return None
    if len({parameter.device for parameter in module.parameters()}) > 1:
        raise ValueError("device_ids must be None for a module on several devices")
    device = torch.device("cuda", _get_device_index(device_ids[0], True))
    module.to(device)
    return device


@functools.cache
def _say_once(text: str) -> None:
    warnings.warn(text, stacklevel=4)
