"""Registers the backend with torch. Runs while torch itself is imported, so it imports next to nothing else."""

from __future__ import annotations

import os
import sys
import warnings
from contextlib import suppress
from importlib import metadata
from typing import Any

from drumline.compat import is_asked_for

NAME = "drumline"
TORCH_MIN = (2, 4)

# From here on torch has backends in Python.
_BACKENDS_MIN = (2, 14)

# From here on `import torch` calls what packages have registered.
_ENTRY_POINTS_MIN = (2, 5)

# What drumline is for torch: a backend of its process groups, or the process group itself.
_BASES = ("backend", "process-group")


def register() -> None:
    """Registers the backend ``drumline``; with DRUMLINE_REPLACE_GLOO=1 also under the name ``gloo``.

    Entry point ``torch.distributed.backends``. Raises ImportError if torch is too old.
    """
    import torch.distributed as dist

    if not dist.is_available():
        raise ImportError("this torch was built without torch.distributed")
    if why := too_old():
        raise ImportError(why)
    _register(NAME)
    if _replaces_gloo():
        # Before, torch makes groups of gloo itself, whatever is registered.
        _register("gloo") if _has_backends() else _stand_in_for_gloo()
    _register_rendezvous()


def _register(name: str) -> None:
    import torch.distributed as dist

    if not is_ours(name):
        dist.Backend.register_backend(name, _create, extended_api=True, devices=["cpu", "cuda"])


def is_ours(name: str) -> bool:
    """Whether the backend of this name is drumline."""
    import torch.distributed as dist

    return dist.Backend._plugins.get(name.upper(), _NONE).creator_fn is _create


def _stand_in_for_gloo() -> None:
    """Has torch read ``gloo`` as drumline where it looks up which backend a device has."""
    from torch.distributed.distributed_c10d import BackendConfig

    theirs = BackendConfig.__init__
    if hasattr(theirs, "_drumline"):
        return

    def init(self: Any, backend: Any) -> None:
        theirs(self, backend)
        for device, name in self.device_backend_map.items():
            if name == "gloo":
                self.device_backend_map[device] = NAME

    init._drumline = True  # type: ignore[attr-defined]
    BackendConfig.__init__ = init


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

    if version_of(torch.__version__) >= TORCH_MIN:
        return ""
    return f"drumline needs torch 2.4 or newer, and this is {torch.__version__}"


def version_of(text: str) -> tuple[int, ...]:
    """The first two numbers of a version of torch."""
    return tuple(int(part) for part in text.split("+")[0].split(".")[:2])


def _has_backends() -> bool:
    """Whether this torch has backends in Python."""
    import torch

    return version_of(torch.__version__) >= _BACKENDS_MIN


def base() -> str:
    """What drumline is for this torch. Raises ValueError if the setting is wrong."""
    asked = os.environ.get("DRUMLINE_TORCH_BASE") or _BASES[not _has_backends()]
    if asked not in _BASES:
        raise ValueError(f"DRUMLINE_TORCH_BASE is {' or '.join(_BASES)}, and not {asked!r}")
    if asked == "backend" and not _has_backends():
        raise ValueError("DRUMLINE_TORCH_BASE=backend needs torch 2.14 or newer")
    return asked


def will_be_called() -> bool:
    """Whether torch is not imported yet, and its import calls `autoload`. Without torch nothing needs to."""
    if "torch" in sys.modules:
        return False
    try:
        return version_of(metadata.version("torch")) >= _ENTRY_POINTS_MIN
    except metadata.PackageNotFoundError:
        return True


def autoload() -> None:
    """Like `register`, but never raises: an error at the end of ``import torch`` would break every program.
    `init_process_group` raises the error for programs that ask for the backend.

    Entry point ``torch.backends``, which torch 2.4 does not know: there, ``import drumline.torch`` calls it.
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


def _replaces_gloo() -> bool:
    return os.environ.get("DRUMLINE_REPLACE_GLOO", "0") not in ("", "0")


def _create(options: Any, backend_options: Any) -> Any:
    """Called for every new group. Only now the rest of the package is imported."""
    if base() == "backend":
        from drumline.torch.backend import create

        return create(options, backend_options)
    from drumline.torch.process_group import create as create_process_group

    return create_process_group(options, backend_options)


class _NONE:
    creator_fn = None
