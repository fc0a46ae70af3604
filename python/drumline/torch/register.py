"""Registers the backend with torch. Runs while torch itself is imported, so it imports next to nothing else."""

from __future__ import annotations

import os
import warnings
from contextlib import suppress
from typing import Any

from drumline.compat import is_asked_for

NAME = "drumline"
TORCH_MIN = (2, 14)


def register() -> None:
    """Registers the backend ``drumline``; with DRUMLINE_REPLACE_GLOO=1 also under the name ``gloo``.

    Entry point ``torch.distributed.backends``. Raises ImportError if torch is too old.
    """
    import torch.distributed as dist

    if not dist.is_available():
        raise ImportError("this torch was built without torch.distributed")
    if why := too_old():
        raise ImportError(why)
    for name in _names():
        if dist.Backend._plugins.get(name.upper(), _NONE).creator_fn is not _create:
            dist.Backend.register_backend(
                name, _create, extended_api=True, devices=["cpu", "cuda"]
            )


    _register_rendezvous()


def _register_rendezvous() -> None:
    """``init_method="mpi://"``, unless the program has a handler for it."""
    from torch.distributed.rendezvous import register_rendezvous_handler

    with suppress(RuntimeError):  # registered already
        register_rendezvous_handler("mpi", _meet_by_mpi)


def _meet_by_mpi(url: str, **options: Any) -> Any:
    """Called by `init_process_group`. Only now the rest of the package is imported."""
    from drumline.torch.rendezvous import over_mpi

    return over_mpi(url, **options)


def too_old() -> str:
    """Why this torch cannot have the backend, and what works instead; empty if it is new enough."""
    import torch

    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if version >= TORCH_MIN:
        return ""
    return (
        f"drumline as a backend needs torch 2.14 or newer, and this is {torch.__version__}: older ones "
        "have no backends in Python. drumline.DistributedDataParallel does without, on a group of gloo "
        "or of drumline.init_process_group, and so does all else of drumline's own."
    )


def autoload() -> None:
    """Like `register`, but never raises: an error at the end of ``import torch`` would break every program.
    `init_process_group` raises the error for programs that ask for the backend.

    Entry point ``torch.backends``, which torch 2.4 does not know: there, `drumline.ddp` calls it.
    """
    try:
        register()
    except Exception as error:  # a broken backend must not break torch
        with suppress(Exception):
            _refuse(str(error))
        if _replaces_gloo():
            warnings.warn(f"drumline cannot take the place of gloo: {error}", stacklevel=2)
    if is_asked_for():
        from drumline.compat.cuda import stand_in

        stand_in()


def _refuse(why: str) -> None:
    """Makes `init_process_group` raise an ImportError with ``why``."""
    import torch.distributed as dist

    def create(*_: Any) -> Any:
        raise ImportError(why)

    dist.Backend.register_backend(NAME, create, extended_api=True, devices=["cpu", "cuda"])


def _names() -> list[str]:
    return [NAME, "gloo"] if _replaces_gloo() else [NAME]


def _replaces_gloo() -> bool:
    return os.environ.get("DRUMLINE_REPLACE_GLOO", "0") not in ("", "0")


def _create(options: Any, backend_options: Any) -> Any:
    """Called for every new group. Only now the rest of the package is imported."""
    from drumline.torch.backend import create

    return create(options, backend_options)


class _NONE:
    creator_fn = None
