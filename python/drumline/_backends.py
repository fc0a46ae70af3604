"""What there is, under torch's names."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta

from drumline import _core
from drumline.stores import Store, of_core


def is_available() -> bool:
    """Whether process groups can be had at all: always. (torch can be built without.)"""
    return True


def is_mpi_available() -> bool:
    """Whether an MPI library is found. It is loaded then, and not started.

    It is looked for at ``DRUMLINE_MPI_LIBRARY``, where the loader looks, beside ``mpiexec``, and in ``lib`` of
    Python's own prefix, where ``pip install mpich`` puts it.
    """
    return _core.is_mpi_available()


def is_nccl_available() -> bool:
    """Whether calls can go through NCCL, for memory of GPUs. They cannot."""
    return False


def is_gloo_available() -> bool:
    """Whether calls can go through gloo. They cannot: drumline takes its place."""
    return False


def is_torchelastic_launched() -> bool:
    """Whether torchrun has started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


class Backend(str):
    """The name of what carries calls, in lower case: ``Backend("DRUMLINE") == "drumline"``.

    The functions that take a ``backend`` take any name, and raise ValueError for one that is not there.
    """

    UNDEFINED = "undefined"
    DRUMLINE = "drumline"
    GLOO = "gloo"
    NCCL = "nccl"
    MPI = "mpi"

    def __new__(cls, name: str) -> Backend:
        if not isinstance(name, str):
            raise ValueError(f"the name of a backend is text, and this is {name!r:.80}")
        return super().__new__(cls, name.lower())

    @classmethod
    def register_backend(
        cls,
        name: str,
        func: Callable[[Store, int, int, timedelta], object],
        extended_api: bool = False,
        devices: object = None,
    ) -> None:
        """Makes ``name``, in any case, a backend for `init_process_group`. The last registration counts.

        ``func(store, rank, world_size, timeout)`` runs on every rank of every group on it, and returns an
        object with a method ``collective(call)``. This method carries out one call and returns what
        `BackendCall` says the result is: the bytes of the result on this rank, or None if the buffer stays
        as it is. Where something is reduced, it may return a list with the bytes of every rank: the core
        reduces them in its own order. What it raises fails the call on this rank. ``abort()`` and
        ``shutdown()`` are called if the object has them. It carries no messages from rank to rank.

        Raises ValueError for a name that is empty or drumline's own.
        """
        if extended_api:
            raise ValueError("register_backend has no extended_api: func(store, rank, world_size, timeout)")

        def make(store: _core.Store, rank: int, world_size: int, seconds: float) -> object:
            return func(of_core(store), rank, world_size, timedelta(seconds=seconds))

        _core.register_backend(name, make)
        setattr(cls, name.upper(), cls(name))
