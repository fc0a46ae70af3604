"""Batch normalisation over the batches of all ranks, on any device."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils import parametrize

from drumline import _core, _world
from drumline.ddp.autograd import untraced
from drumline.ddp.groups import core_group
from drumline.torch.tensors import CODE


class SyncBatchNorm(_BatchNorm):
    """Batch normalisation with the statistics of all ranks, as if the batch were one.

    Input ``[N, C, ...]``; ``N`` may differ between ranks, and be 0. torch's class of this name, but for the
    CPU, too. Evaluation, a single process, and a process without a process group: `BatchNorm` as it is.
    Statistics are the same bits on every rank. Gradients can be differentiated again.
    """

    process_group: Any = None
    # Whether a subclass that normalises has still to call this class.
    _is_awaited = False

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: Any = None,
        device: Any = None,
        dtype: Any = None,
        *,
        bias: bool = True,
    ) -> None:
        super().__init__(
            num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype
        )
        if not bias:
            # Older ones of torch have no argument for it.
            self.register_parameter("bias", None)
        self.process_group = process_group

    def _check_input_dim(self, input: Any) -> None:
        if input.dim() < 2:
            raise ValueError(f"SyncBatchNorm takes [N, C, ...], and got {input.dim()} dimensions")

    def forward(self, input: Any) -> Any:
        """Normalises. A collective in training."""
        if self._is_awaited:
            self._is_awaited = False
        return self._in_training(input) if self.training else super().forward(input)

    @untraced
    def _in_training(self, input: Any) -> Any:
        group = self._group()
        if group is None:
            return super().forward(input)
        self._check_input_dim(input)
        if not input.is_floating_point():
            raise TypeError(f"SyncBatchNorm takes floating-point input, and got {input.dtype}")
        channels = input.shape[1]
        if channels == 0 or channels != self.num_features:
            raise ValueError(f"SyncBatchNorm expects {self.num_features} channels, and got {channels}")
        output, mean, variance, count = _Normalise.apply(
            input, self.weight, self.bias, group, self.eps
        )
        self._track(mean, variance, count)
        return output

    def _group(self) -> _core.Group | None:
        """The group; None without other ranks."""
        if self.process_group is None and not _has_world():
            return None
        group = core_group(self.process_group)
        return group if group.world_size > 1 else None

    def _track(self, mean: Any, variance: Any, count: int) -> None:
        if not self.track_running_stats:
            return
        batches, means, variances = self.num_batches_tracked, self.running_mean, self.running_var
        with torch.no_grad():
            if batches is not None:
                batches += 1
            # Batches without any value say nothing.
            if means is None or variances is None or count == 0:
                return
            factor = self.momentum
            if factor is None:
                factor = 0.0 if batches is None else 1 / batches.item()
            means.lerp_(mean.to(means), factor)
            variances.lerp_((variance * (count / (count - 1))).to(variances), factor)

    @classmethod
    def convert_sync_batchnorm(cls, module: torch.nn.Module, process_group: Any = None) -> Any:
        """`drumline.convert_sync_batchnorm`."""
        return convert_sync_batchnorm(module, process_group)


def convert_sync_batchnorm(module: torch.nn.Module, process_group: Any = None) -> Any:
    """Makes all batch normalisation in a module that of all ranks, and returns the module.

    The modules stay the same objects with all they have: parameters, statistics, hooks, attributes, several
    names. A subclass of torch's classes keeps its methods: what it computes through the ``forward`` that it
    inherits is computed over all ranks. A warning names, in training, a subclass that does not call it. Lazy
    modules are converted too. Without other ranks the module works as before.
    """
    for norm in module.modules():
        if isinstance(norm, _BatchNorm):
            norm.__class__ = _class_for(norm)
            norm.process_group = process_group
    return module


_PLAIN = (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d, torch.nn.SyncBatchNorm)


def is_synchronised(module: torch.nn.Module) -> bool:
    """Whether a forward of this module needs the other ranks."""
    return module.training and isinstance(module, (SyncBatchNorm, torch.nn.SyncBatchNorm))


def _class_for(norm: Any) -> Any:
    own: Any = type(norm)
    if issubclass(own, SyncBatchNorm) or not parametrize.is_parametrized(norm):
        return _synchronised(own)
    # The class of a parametrised module is its own, and its base is what it becomes without parametrisations.
    members = {name: it for name, it in vars(own).items() if name not in ("__dict__", "__weakref__")}
    return type(own.__name__, (_synchronised(own.__bases__[0]),), members)


@functools.cache
def _synchronised(kind: Any) -> Any:
    """The class with `SyncBatchNorm` in the place of the BatchNorm that it is."""
    if issubclass(kind, SyncBatchNorm):
        return kind
    if kind in _PLAIN:
        return SyncBatchNorm
    # Behind all of the classes between `kind` and _BatchNorm.
    members: dict[str, Any] = {"__module__": kind.__module__, "__reduce_ex__": _reducing(kind)}
    if kind.forward is not _BatchNorm.forward:
        members["forward"] = _watched(kind)
    if issubclass(kind, LazyModuleMixin) and kind.cls_to_become is not None:
        members["cls_to_become"] = _synchronised(kind.cls_to_become)
    return type(f"Sync{kind.__name__}", (kind, SyncBatchNorm), members)


def _watched(kind: Any) -> Callable[..., Any]:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        self._is_awaited = True
        output = kind.forward(self, *args, **kwargs)
        if self.training and self._is_awaited:
            _say_once(
                f"{kind.__qualname__} normalises by itself, and not through the forward of BatchNorm: "
                "convert_sync_batchnorm has left its statistics as they were, those of this rank alone"
            )
        return output

    return forward


def _reducing(kind: Any) -> Callable[..., Any]:
    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        # Pickled as an instance of `kind`, which can be imported.
        reduced: Any = object.__reduce_ex__(self, max(protocol, 2))
        return (_empty, (kind,), *reduced[2:])

    return __reduce_ex__


def _empty(kind: Any) -> Any:
    made = _synchronised(kind)
    return object.__new__(made)


@functools.cache
def _say_once(text: str) -> None:
    warnings.warn(text, stacklevel=4)


def _has_world() -> bool:
    distributed = torch.distributed
    is_there = distributed.is_available() and distributed.is_initialized()
    return is_there or _world.is_initialized()


class _Normalise(torch.autograd.Function):
    """``(output, mean, variance, values per channel)``; the last three are those of all ranks."""

    @staticmethod
    def forward(
        ctx: Any, input: Any, weight: Any, bias: Any, group: _core.Group, eps: float
    ) -> tuple[Any, Any, Any, int]:
        x = _summable(input)
        mean, squares, count = _statistics(x)
        mean, variance, total = _of_all_ranks(mean, squares, count, group)
        if total == 1:
            raise ValueError(
                "expected more than 1 value per channel when training, and all ranks together have 1 (this "
                f"one has an input of {tuple(input.shape)})"
            )
        inverse = (variance + eps).rsqrt()
        output = (x - _wide(mean, x)) * _wide(inverse, x)
        if weight is not None:
            output = output * _wide(weight, x)
        if bias is not None:
            output = output + _wide(bias, x)
        ctx.save_for_backward(input, weight, mean, inverse)
        ctx.group, ctx.total, ctx.eps = group, total, eps
        ctx.bias_type = None if bias is None else bias.dtype
        ctx.mark_non_differentiable(mean, variance)
        return output.to(input.dtype), mean, variance, total

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: Any
    ) -> tuple[Any, ...]:
        input, weight, mean, inverse = ctx.saved_tensors
        needs_input, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        x, group, total = _summable(input), ctx.group, max(ctx.total, 1)
        dy, dims = grad_outputs[0].to(x.dtype), _all_but_channels(x)
        if needs_input and torch.is_grad_enabled():
            # What is computed here is differentiated again, so statistics must be functions of the input.
            mean = _AllRanks.sum(x.sum(dims), group) / total
            squares = (x - _wide(mean, x)).square().sum(dims)
            inverse = (_AllRanks.sum(squares, group) / total + ctx.eps).rsqrt()
        normal = (x - _wide(mean, x)) * _wide(inverse, x)
        sum_dy, sum_dy_x = dy.sum(dims), (dy * normal).sum(dims)
        grad_input = None
        if needs_input:
            all_dy, all_dy_x = _AllRanks.sum(torch.stack([sum_dy, sum_dy_x]), group) / total
            scale = inverse if weight is None else inverse * weight
            grad_input = dy - _wide(all_dy, x) - normal * _wide(all_dy_x, x)
            grad_input = (grad_input * _wide(scale, x)).to(input.dtype)
        grad_weight = sum_dy_x.to(weight.dtype) if needs_weight and weight is not None else None
        grad_bias = sum_dy.to(ctx.bias_type) if needs_bias else None
        return grad_input, grad_weight, grad_bias, None, None


class _AllRanks(torch.autograd.Function):
    """The sum over all ranks, as a function that can be differentiated."""

    @staticmethod
    def sum(values: Any, group: _core.Group) -> Any:
        """Formed in double precision in the memory of the CPU."""
        total = _AllRanks.apply(values.double().cpu(), group)
        return total.to(values.device)

    @staticmethod
    def forward(ctx: Any, values: Any, group: _core.Group) -> Any:
        ctx.group = group
        total = values.contiguous().clone()
        group.all_reduce(_memory(total), "sum")
        return total

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: Any
    ) -> tuple[Any, ...]:
        return _AllRanks.apply(grad_outputs[0], ctx.group), None


def _summable(input: Any) -> Any:
    # Half types are summed as float32 is.
    return input if input.dtype == torch.float64 else input.float()


def _statistics(x: Any) -> tuple[Any, Any, int]:
    """Mean, sum of squared distances from it, and number of values, per channel."""
    channels, dims = x.shape[1], _all_but_channels(x)
    count = x.numel() // channels if channels else 0
    if count == 0:
        zeros = torch.zeros(channels, dtype=torch.float64, device=x.device)
        return zeros, zeros, 0
    mean = x.mean(dims)
    squares = (x - _wide(mean, x)).square().sum(dims)
    return mean.double(), squares.double(), count


def _of_all_ranks(
    mean: Any, squares: Any, count: int, group: _core.Group
) -> tuple[Any, Any, int]:
    """Mean, variance and number of values of all ranks, the same bits on each."""
    own = torch.cat([mean, squares, mean.new_tensor([count])]).cpu()
    rows = torch.empty(group.world_size, own.numel(), dtype=torch.float64)
    group.all_gather(_memory(own), [_memory(rows)])
    channels = mean.numel()
    means, spreads, counts = rows[:, :channels], rows[:, channels:-1], rows[:, -1:]
    total = counts.sum().clamp(min=1)
    joint = (counts * means).sum(0) / total
    variance = (spreads + counts * (means - joint).square()).sum(0) / total
    return joint.to(mean.device), variance.to(mean.device), int(counts.sum())


def _all_but_channels(x: Any) -> list[int]:
    return [dim for dim in range(x.dim()) if dim != 1]


def _wide(per_channel: Any, x: Any) -> Any:
    """Values per channel in a shape that goes with ``x``."""
    return per_channel.to(x.dtype).reshape(1, -1, *[1] * (x.dim() - 2))


def _memory(tensor: Any) -> _core.Memory:
    return tensor.data_ptr(), tensor.numel(), CODE[tensor.dtype], tensor
