"""Makes the name known to torch. Runs while torch itself is imported, so it imports nothing else."""

from __future__ import annotations

import os
import warnings
from typing import Any

NAME = "drumline"
TORCH_MIN = (2, 14)


def register() -> None:
    """Registers the backend ``drumline``; with DRUMLINE_REPLACE_GLOO=1 also under the name ``gloo``.

    Entry point ``torch.distributed.backends``. Raises ImportError if torch is too old.
    """
    import torch
    import torch.distributed as dist

    if not dist.is_available():
        raise ImportError("this torch was built without torch.distributed")
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if version < TORCH_MIN:
        raise ImportError(
            f"drumline as a backend needs torch 2.14 or newer, and this is {torch.__version__}: "
            "older ones have no backends in Python. The direct API (drumline.init_process_group) "
            "and drumline's own DistributedDataParallel do without."
        )
    for name in _names():
        if dist.Backend._plugins.get(name.upper(), _NONE).creator_fn is not _create:
            dist.Backend.register_backend(
                name, _create, extended_api=True, devices=["cpu", "cuda"]
            )


def autoload() -> None:
    """The same for the end of ``import torch``, where an error would harm everybody.

    Entry point ``torch.backends``.
    """
    try:
        register()
    except Exception as error:  # a broken backend must not break torch
        if _replaces_gloo():
            warnings.warn(f"drumline cannot take the place of gloo: {error}", stacklevel=2)


def _names() -> list[str]:
    return [NAME, "gloo"] if _replaces_gloo() else [NAME]


def _replaces_gloo() -> bool:
    return os.environ.get("DRUMLINE_REPLACE_GLOO", "0") not in ("", "0")


def _create(options: Any, backend_options: Any) -> Any:
    """Called for every new group; only now is the rest imported."""
    from drumline.torch.backend import create

    return create(options, backend_options)


class _NONE:
    creator_fn = None
