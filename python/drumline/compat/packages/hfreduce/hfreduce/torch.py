"""drumline in the place of hfreduce.torch."""

from drumline.compat.haiscale import AsyncReduceFloat

__all__ = ["AsyncReduceFloat"]
