"""drumline in the place of haiscale.ddp.ddp."""

from drumline.compat.haiscale import DistributedDataParallel

__all__ = ["DistributedDataParallel"]
