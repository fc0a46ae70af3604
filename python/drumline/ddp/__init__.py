"""Data-parallel training of torch modules on drumline's core.

>>> from drumline import DistributedDataParallel
>>> model = DistributedDataParallel(model)      # doctest: +SKIP

Works with every torch from 2.4 on, and with any process group: drumline's own, or torch's of any
backend, beside which the ranks connect by themselves.
"""

try:
    import torch as _torch  # noqa: F401
except ImportError as _error:
    raise ImportError(
        "drumline's DistributedDataParallel and SyncBatchNorm need torch: pip install 'drumline[torch]'"
    ) from _error

from drumline.ddp.hooks import bf16_compress, fp16_compress
from drumline.ddp.module import DistributedDataParallel
from drumline.ddp.power_sgd import PowerSGDState, power_sgd
from drumline.ddp.reducer import Reducer
from drumline.ddp.sync_batch_norm import SyncBatchNorm, convert_sync_batchnorm
from drumline.torch.register import autoload as _autoload

_autoload()

__all__ = [
    "DistributedDataParallel",
    "PowerSGDState",
    "Reducer",
    "SyncBatchNorm",
    "bf16_compress",
    "convert_sync_batchnorm",
    "fp16_compress",
    "power_sgd",
]
