"""PowerSGD (Vogels, Karimireddy, Jaggi 2019): gradients travel as products of thin matrices.

A gradient of ``n x m`` elements travels as ``(n + m) * rank``. What the product leaves out is added to
the gradient of the next step (error feedback).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.futures import Future

from drumline import _core
from drumline.ddp.groups import core_group
from drumline.torch.tensors import Staging


class PowerSGDState:
    """The state of `power_sgd` between steps. The arguments have torch's names and meaning.

    The first ``start_powerSGD_iter`` steps are averaged without compression. A matrix is compressed if
    that makes it at least ``min_compression_rate`` times shorter.
    """

    def __init__(
        self,
        process_group: Any = None,
        matrix_approximation_rank: int = 1,
        start_powerSGD_iter: int = 1000,  # noqa: N803 (torch's name)
        min_compression_rate: float = 2.0,
        use_error_feedback: bool = True,
        warm_start: bool = True,
        orthogonalization_epsilon: float = 0.0,
        random_seed: int = 0,
    ) -> None:
        if matrix_approximation_rank < 1:
            raise ValueError("matrix_approximation_rank is at least 1")
        self.group: _core.Group = core_group(process_group)
        self.rank, self.start = matrix_approximation_rank, start_powerSGD_iter
        self.min_rate, self.epsilon = min_compression_rate, orthogonalization_epsilon
        self.use_error_feedback, self.warm_start = use_error_feedback, warm_start
        self.generator = torch.Generator().manual_seed(random_seed)
        self.step = 0
        self.errors: dict[int, Any] = {}
        self.factors: dict[tuple[int, int], Any] = {}

    def compresses(self, gradient: Any) -> bool:
        """Whether a gradient becomes short enough."""
        if gradient.dim() < 2 or gradient.numel() == 0 or gradient.is_complex():
            return False
        n, m = gradient.shape[0], gradient.numel() // gradient.shape[0]
        return bool((n + m) * self.rank * self.min_rate < n * m)


def power_sgd(state: PowerSGDState, bucket: Any) -> Future[Any]:
    """For `DistributedDataParallel.register_comm_hook`. Blocks for the short time that it takes."""
    buffer = bucket.buffer()
    if state.step < state.start:
        _average(state.group, [buffer])
    else:
        _compressed(state, bucket, buffer)
    if bucket.is_last():
        state.step += 1
    future: Future[Any] = Future()
    future.set_result(buffer)
    return future


def _compressed(state: PowerSGDState, bucket: Any, buffer: Any) -> None:
    index, gradients = bucket.index(), bucket.gradients()
    if state.use_error_feedback and index in state.errors:
        buffer.add_(state.errors[index])
    wanted = buffer.clone() if state.use_error_feedback else None
    small = [it for it in gradients if not state.compresses(it)]
    large = {number: it for number, it in enumerate(gradients) if state.compresses(it)}

    matrices = {number: it.reshape(it.shape[0], -1).float() for number, it in large.items()}
    qs = {number: _start(state, (index, number), it) for number, it in matrices.items()}
    ps = {number: matrix @ qs[number] for number, matrix in matrices.items()}
    _average(state.group, list(ps.values()))
    for number, p in ps.items():
        ps[number] = _orthogonal(p, state.epsilon)
        qs[number] = matrices[number].t() @ ps[number]
    _average(state.group, [*qs.values(), *small])
    for number, gradient in large.items():
        gradient.copy_((ps[number] @ qs[number].t()).reshape(gradient.shape))
        if state.warm_start:
            state.factors[index, number] = qs[number]
    if wanted is not None:
        error = wanted - buffer
        for gradient in small:  # travelled as they are
            _part(error, buffer, gradient).zero_()
        state.errors[index] = error


def _start(state: PowerSGDState, key: tuple[int, int], matrix: Any) -> Any:
    """The factor to begin with: that of the last step, or random, the same on all ranks."""
    known = state.factors.get(key)
    if known is None:
        shape = (matrix.shape[1], state.rank)
        known = torch.randn(shape, generator=state.generator).to(matrix.device)
    return _orthogonal(known, state.epsilon)


def _orthogonal(matrix: Any, epsilon: float) -> Any:
    """The columns made orthonormal, one after the other."""
    matrix = matrix.clone()
    for column in range(matrix.shape[1]):
        one = matrix[:, column]
        one.div_(one.norm() + (epsilon or torch.finfo(one.dtype).tiny))
        rest = matrix[:, column + 1 :]
        rest.sub_(one[:, None] * (one @ rest)[None, :])
    return matrix


def _part(flat: Any, buffer: Any, place: Any) -> Any:
    """The elements of a flat tensor that belong to ``place``, a view of ``buffer``."""
    first = place.storage_offset() - buffer.storage_offset()
    return flat[first : first + place.numel()]


def _average(group: _core.Group, tensors: list[Any]) -> None:
    """In place, in one operation for each type."""
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        staging = Staging()
        data = [staging.write(it, reduce=True) for it in tensors if it.dtype == dtype]
        group.all_reduce_coalesced(data, "avg")
        staging.finish()
