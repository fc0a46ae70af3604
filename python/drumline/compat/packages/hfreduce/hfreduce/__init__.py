"""drumline in the place of hfreduce."""

from drumline.compat.haiscale import NativeAsyncReduceFloat as AsyncReduceFloat

__all__ = ["AsyncReduceFloat"]
