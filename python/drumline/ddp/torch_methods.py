"""Further methods of torch's class that programs and libraries call."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.join import Joinable
from torch.nn.parallel.scatter_gather import gather, scatter_kwargs

from drumline.ddp import hooks
from drumline.ddp.debug import Debug
from drumline.ddp.graph import moved
from drumline.ddp.groups import core_group
from drumline.ddp.logging_data import logging_data
from drumline.ddp.reducer import Reducer
from drumline.groups import ProcessGroup


class TorchMethods(Joinable):
    """Methods and attributes of torch's DistributedDataParallel beside training itself.

    Names with a leading underscore are private in torch. They are here for programs that use them.
    """

    module: Any
    device: Any
    device_type: str
    dim: int
    process_group: Any
    static_graph: bool
    find_unused_parameters: bool
    forward_sync_buffers: bool
    register_comm_hook: Callable[..., None]
    _connect: Callable[..., Reducer]
    _join_config: Any
    _debug: Debug
    _buffers_in_use: Callable[[], dict[str, Any]]
    _buffer_hook: tuple[Callable[..., Any], object, bool] | None

    @property
    @abstractmethod
    def reducer(self) -> Reducer: ...

    @property
    def require_backward_grad_sync(self) -> bool:
        """torch's name of ``reducer.sync_grad``."""
        return self.reducer.sync_grad

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        self.reducer.sync_grad = value

    @property
    def broadcast_buffers(self) -> bool:
        """The older name of ``forward_sync_buffers``."""
        return self.forward_sync_buffers

    @broadcast_buffers.setter
    def broadcast_buffers(self, value: bool) -> None:
        self.forward_sync_buffers = value

    def will_sync_module_buffers(self) -> bool:
        """Whether a forward now would take rank 0's buffers."""
        return self._syncs_buffers() and bool(self._buffers_in_use())

    def _syncs_buffers(self) -> bool:
        return torch.is_grad_enabled() and self.forward_sync_buffers and self.reducer.sync_grad

    # From the time of several devices per process.

    def scatter(self, inputs: Any, kwargs: Any, device_ids: Sequence[Any]) -> Any:
        """Inputs in parts, one for each device, along ``dim``."""
        return scatter_kwargs(inputs, kwargs, device_ids, dim=self.dim)

    def to_kwargs(self, inputs: Any, kwargs: Any, device_id: Any) -> Any:
        """Inputs on a device, each as the only one of a tuple."""
        device = torch.device(self.device_type, device_id)
        return (moved(inputs, device),), (moved(kwargs, device),)

    def gather(self, outputs: Any, output_device: Any) -> Any:
        """Outputs of several devices on one, along ``dim``."""
        return gather(outputs, output_device, dim=self.dim)

    # For torch.distributed.algorithms.Join.

    @property
    def join_device(self) -> Any:
        """Where `Join` counts ranks."""
        return self.device

    @property
    def join_process_group(self) -> Any:
        """The torch group in which `Join` counts ranks."""
        if isinstance(self.process_group, ProcessGroup):
            raise TypeError(
                "torch's Join counts ranks in a process group of torch's, and this model is on one of "
                "drumline.init_process_group: use model.join() instead, or call "
                "torch.distributed.init_process_group before the model is wrapped"
            )
        return self.process_group

    # The end of a backward, by hand.

    @property
    def require_manual_backward_finalization(self) -> bool:
        """Whether `finalize_backward` waits for averages, and not the end of backward."""
        return not self.reducer.sync_backward

    @require_manual_backward_finalization.setter
    def require_manual_backward_finalization(self, required: bool) -> None:
        self.reducer.sync_backward = not required

    @property
    def should_finalize_after_backward(self) -> bool:
        """Whether `finalize_backward` is to be called when backward has returned, and not inside of it."""
        return self.require_manual_backward_finalization

    def finalize_backward(self) -> None:
        """Waits for the averages, if `require_manual_backward_finalization`."""
        if not self.require_manual_backward_finalization:
            raise RuntimeError(
                "backward waits for its averages by itself: finalize_backward() is for a model with "
                "require_manual_backward_finalization = True"
            )
        if not self.reducer.is_pending:
            raise RuntimeError(
                "finalize_backward() has nothing to wait for: call it once after each backward through "
                "the model's outputs, and not under no_sync()"
            )
        self.reducer.synchronize()

    # Not public in torch.

    def _check_reducer_finalized(self) -> None:
        """Raises if gradients are not averaged, or cannot be averaged any more."""
        self.reducer.check()

    def _set_static_graph(self) -> None:
        """As ``static_graph=True``. A collective, between two steps."""
        if self.static_graph:
            warnings.warn("static_graph is set already", stacklevel=2)
            return
        self.reducer.set_static_graph()
        self.static_graph = True

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        """``BuiltinCommHookType.ALLREDUCE`` or ``FP16_COMPRESS``."""
        name = getattr(comm_hook_type, "name", str(comm_hook_type))
        builtin = {"ALLREDUCE": allreduce_hook, "FP16_COMPRESS": hooks.fp16_compress}
        if name not in builtin:
            raise ValueError(f"the hooks are ALLREDUCE and FP16_COMPRESS, and this is {name}")
        self.register_comm_hook(None, builtin[name])

    def _register_buffer_comm_hook(
        self, state: object, hook: Callable[..., Any], comm_hook_location: Any = None
    ) -> None:
        """Calls ``hook(state, buffers)``, with a dict by name, instead of giving all ranks the buffers of
        rank 0. If the hook returns futures, the wrapper waits for them at once.

        The hook runs after forward, or before it with ``_BufferCommHookLocation.PRE_FORWARD``.
        """
        if not callable(hook):
            raise TypeError(f"a hook for buffers is callable, and this is a {type(hook).__name__}")
        is_before = getattr(comm_hook_location, "name", None) == "PRE_FORWARD"
        self._buffer_hook = hook, state, is_before

    def _update_process_group(self, new_process_group: Any) -> None:
        """Moves to another group. A collective of the new members. The old group may have failed. A rank
        that is no member changes nothing. Communication hooks must be registered again."""
        if new_process_group is dist.GroupMember.NON_GROUP_MEMBER:
            return
        core_group(new_process_group)  # raises while the old one is still there
        self._connect(new_process_group, init_sync=False)

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        """Settings and measured times, under torch's names where drumline has the same thing."""
        return logging_data(self)

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        """Of which steps TORCH_DISTRIBUTED_DEBUG=DETAIL tells: every so many. All are measured."""
        if sample_rate < 1:
            raise ValueError(f"a sample rate is at least 1, and this is {sample_rate}")
        self._debug.every = sample_rate

    def _set_ddp_sink_clone(self, val: bool) -> None:
        """Taken and not needed: outputs are never copied."""

    def _register_fused_optim(self, optim: Any, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(_STEPS_IN_BACKWARD)

    @property
    def _has_rebuilt_buckets(self) -> bool:
        raise NotImplementedError(
            "this is a hook for buckets that stay the same, as of "
            "ZeroRedundancyOptimizer(overlap_with_ddp=True): step after backward, without overlap_with_ddp"
        )

    def _set_sparse_metadata(self, global_unique_ids: Any) -> None:
        raise NotImplementedError(
            "drumline's DistributedDataParallel takes no sparse gradients: use torch's on the backend "
            "drumline, or sparse=False"
        )


_STEPS_IN_BACKWARD = (
    "drumline's DistributedDataParallel has no optimizers inside of backward, where gradients are not "
    "averaged yet: call step() after backward, or use torch's DistributedDataParallel on the backend "
    "drumline"
)


def refuse_optimizers_in_backward(parameters: dict[str, Any]) -> None:
    """Raises for what ``_apply_optimizer_in_backward`` has prepared: it would step too early."""
    for name, parameter in parameters.items():
        if hasattr(parameter, "_in_backward_optimizers"):
            raise NotImplementedError(f"parameter {name}: {_STEPS_IN_BACKWARD}")
