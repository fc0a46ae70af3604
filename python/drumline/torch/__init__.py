"""drumline as a backend of torch.distributed.

A script need not import this: torch finds the backend by its entry points. Torch 2.4 does not look for them, so
there a script imports this first.

>>> torch.distributed.init_process_group("drumline")  # doctest: +SKIP
"""

from drumline.torch.register import autoload as _autoload
from drumline.torch.register import register
from drumline.torch.register import will_be_called as _will_be_called

__all__ = ["register"]

if not _will_be_called():
    _autoload()
