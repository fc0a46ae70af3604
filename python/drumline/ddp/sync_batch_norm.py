"""Batch normalisation over the batches of all ranks, on any device."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from drumline import _core, _world
from drumline.ddp.groups import core_group
from drumline.torch.tensors import CODE


class SyncBatchNorm(torch.nn.modules.batchnorm._BatchNorm):
    """Batch normalisation with the statistics of all ranks, as if the batch were one.

    Input ``[N, C, ...]``; ``N`` may differ between ranks. torch's class of this name, but for the CPU,
    too. Evaluation, a single process, and a process without a process group: `BatchNorm` as it is.
    Statistics are the same bits on every rank.
    """

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
    ) -> None:
        super().__init__(
            num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype
        )
        self.process_group = process_group

    def _check_input_dim(self, input: Any) -> None:
        if input.dim() < 2:
            raise ValueError(f"SyncBatchNorm takes [N, C, ...], and got {input.dim()} dimensions")

    def forward(self, input: Any) -> Any:
        """Normalises. A collective in training."""
        group = self._group()
        if group is None:
            return super().forward(input)
        self._check_input_dim(input)
        output, mean, variance, count = _Normalise.apply(
            input, self.weight, self.bias, group, self.eps
        )
        self._track(mean, variance * (count / max(count - 1, 1)))
        return output

    def _group(self) -> _core.Group | None:
        """The group; None without other ranks."""
        if not self.training or (self.process_group is None and not _has_world()):
            return None
        group = core_group(self.process_group)
        return group if group.world_size > 1 else None

    def _track(self, mean: Any, variance: Any) -> None:
        batches, means, variances = self.num_batches_tracked, self.running_mean, self.running_var
        if batches is None or means is None or variances is None:
            return
        with torch.no_grad():
            batches += 1
            factor = 1 / batches.item() if self.momentum is None else self.momentum
            means.lerp_(mean.to(means), factor)
            variances.lerp_(variance.to(variances), factor)

    @classmethod
    def convert_sync_batchnorm(cls, module: torch.nn.Module, process_group: Any = None) -> Any:
        """`drumline.convert_sync_batchnorm`."""
        return convert_sync_batchnorm(module, process_group)


def convert_sync_batchnorm(module: torch.nn.Module, process_group: Any = None) -> Any:
    """Replaces all batch normalisation in a module; weights and statistics are kept. Returns the
    module, or what takes its place.

    Without other ranks the module works as before.
    """
    if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
        return _converted(module, process_group)
    for name, child in module.named_children():
        module.add_module(name, convert_sync_batchnorm(child, process_group))
    return module


def _converted(norm: Any, process_group: Any) -> SyncBatchNorm:
    converted = SyncBatchNorm(
        norm.num_features,
        norm.eps,
        norm.momentum,
        norm.affine,
        norm.track_running_stats,
        process_group,
    )
    # The very same parameters: an optimizer may have them.
    for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked"):
        setattr(converted, name, getattr(norm, name))
    converted.training = norm.training
    return converted


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
        # Half types are summed as float32 is.
        x = input if input.dtype == torch.float64 else input.float()
        mean, squares, count = _statistics(x)
        mean, variance, total = _of_all_ranks(mean, squares, count, group)
        if total <= 1:
            raise ValueError(
                f"expected more than 1 value per channel when training, got {tuple(input.shape)} on "
                "this rank and nothing on the others"
            )
        inverse = (variance + eps).rsqrt()
        normal = (x - _wide(mean, x)) * _wide(inverse, x)
        ctx.save_for_backward(input, weight, mean, inverse)
        ctx.group, ctx.total = group, total
        output = normal if weight is None else normal * _wide(weight, x) + _wide(bias, x)
        output = output.to(input.dtype)
        ctx.mark_non_differentiable(mean, variance)
        return output, mean, variance, total

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: Any
    ) -> tuple[Any, ...]:
        input, weight, mean, inverse = ctx.saved_tensors
        x = input if input.dtype == torch.float64 else input.float()
        dy, dims = grad_outputs[0].to(x.dtype), _all_but_channels(x)
        normal = (x - _wide(mean, x)) * _wide(inverse, x)
        sum_dy, sum_dy_x = dy.sum(dims), (dy * normal).sum(dims)
        grad_input = None
        if ctx.needs_input_grad[0]:
            sums = torch.stack([sum_dy, sum_dy_x]).double().cpu()
            ctx.group.all_reduce(_memory(sums), "sum")
            all_dy, all_dy_x = (sums / ctx.total).to(x.device)
            scale = inverse if weight is None else inverse * weight
            grad_input = dy - _wide(all_dy, x) - normal * _wide(all_dy_x, x)
            grad_input = (grad_input * _wide(scale, x)).to(input.dtype)
        if weight is None:
            return grad_input, None, None, None, None
        return grad_input, sum_dy_x.to(weight.dtype), sum_dy.to(weight.dtype), None, None


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
