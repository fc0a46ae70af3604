"""Forward and backward in a shorter type, beside parameters that stay as they are."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from drumline.ddp.graph import mapped


@dataclass(frozen=True)
class Precision:
    """Types for elements with a decimal point, each None for what it is anyhow.

    ``parameters``: that of parameters and inputs in forward and backward. ``reduction``: that in which
    gradients travel. ``buffers``: that of buffers, for good.
    """

    parameters: Any = None
    reduction: Any = None
    buffers: Any = None

    @classmethod
    def like_torch(cls, config: Any) -> Precision:
        """From torch's ``_MixedPrecision``, or an object with its fields. Gradients travel in the type of
        the parameters unless ``reduce_dtype`` is set."""
        if config is None:
            return cls()
        try:
            parameters, reduction = config.param_dtype, config.reduce_dtype
            return cls(parameters, reduction or parameters, config.buffer_dtype)
        except AttributeError:
            raise TypeError(
                "mixed_precision has the fields param_dtype, reduce_dtype and buffer_dtype, as "
                f"torch.nn.parallel.distributed._MixedPrecision, and this is a {type(config).__name__}"
            ) from None

    def cast_buffers(self, buffers: Iterable[Any]) -> None:
        """Gives buffers their type."""
        if self.buffers is not None:
            for buffer in buffers:
                buffer.data = _cast(buffer.data, self.buffers)

    def call(
        self, module: Any, parameters: dict[str, Any], inputs: Any, kwargs: dict[str, Any]
    ) -> Any:
        """The forward of ``module`` on casts of its parameters. Backward casts the gradients back to the
        type of the parameters."""
        if self.parameters is None:
            return module(*inputs, **kwargs)
        dtype = self.parameters
        casts = {name: _cast(parameter, dtype) for name, parameter in parameters.items()}
        inputs, kwargs = (mapped(it, lambda tensor: _cast(tensor, dtype)) for it in (inputs, kwargs))
        return torch.func.functional_call(module, casts, inputs, kwargs)


def _cast(tensor: Any, dtype: Any) -> Any:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor
