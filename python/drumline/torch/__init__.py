"""drumline as a backend of torch.distributed.

A script need not import this: torch finds the backend by its entry points.

>>> torch.distributed.init_process_group("drumline")  # doctest: +SKIP
"""

from drumline.torch.register import register

__all__ = ["register"]
