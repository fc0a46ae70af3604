"""drumline in the place of haiscale.ddp."""

from haiscale.ddp.ddp import DistributedDataParallel

__all__ = ["DistributedDataParallel"]
