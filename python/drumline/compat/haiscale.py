"""HaiScale's DistributedDataParallel and hfreduce, for programs that are written for them.

A program that imports `haiscale.ddp` or `hfreduce` runs after this::

    import drumline.compat.haiscale
    drumline.compat.haiscale.install()

or, unchanged, as ``python -m drumline.compat.haiscale program.py``. Where the real packages are installed,
they are left alone, unless ``install(replace=True)``.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import torch
import torch.distributed as dist

from drumline import _core, _exit, compat, ddp
from drumline.compat.cuda import stand_in
from drumline.ddp.groups import core_group
from drumline.ddp.reducer import Reducer
from drumline.groups import ProcessGroup


class AsyncReduceFloat(Reducer):
    """hfreduce's reducer for the gradients of a torch module.

    ``local_rank`` of ``ranks_per_node`` on node ``node_rank`` of ``num_nodes``. The ranks use torch's
    process group, if it has as many; else they meet at ``ip:port``, where rank 0 listens.

    ``sync_backward``: the end of backward waits for all averages; else `synchronize` does.
    ``sync_grad = False``: gradients add up on each rank. `filter_unused_parameters` and `stop` are
    those of `drumline.ddp.Reducer`.
    """

    def __init__(
        self,
        ip: str,
        port: int | str,
        local_rank: int,
        ranks_per_node: int,
        node_rank: int,
        num_nodes: int,
        module: torch.nn.Module,
        sync_backward: bool = False,
    ) -> None:
        world_size, rank = ranks_per_node * num_nodes, node_rank * ranks_per_node + local_rank
        group = _group(ip, int(port), rank, world_size)
        parameters = {name: it for name, it in module.named_parameters() if it.requires_grad}
        super().__init__(group, parameters, marks=True, sync_backward=sync_backward)


class NativeAsyncReduceFloat:
    """hfreduce's native reducer, for programs that hand it pointers to float32 on a GPU.

    Process ``proc_rank`` of ``nprocs`` on node ``node_rank`` of ``nnodes``. All processes register the same
    ``n_tensors`` tensors, set a destination for all of them, and bring each once in a step. The results are sums.
    ``device`` is the driver's number of the GPU. Reducers of one process need no ``reducer_id`` here.
    """

    def __init__(
        self,
        host: str,
        port: int | str,
        device: int,
        proc_rank: int,
        nprocs: int,
        node_rank: int,
        nnodes: int,
        n_tensors: int,
        reducer_id: int = 0,
    ) -> None:
        self._group = _group(host, int(port), node_rank * nprocs + proc_rank, nprocs * nnodes)
        self._device, self._count = device, n_tensors
        self._tensors: dict[str, int] = {}
        self._core: _core.DeviceAsyncReduce | None = None

    def register_float_tensor(self, name: str, numel: int) -> None:
        """Adds a tensor. They lie side by side in the destination, in the order of rank 0."""
        if name in self._tensors:
            raise ValueError(f"tensor {name!r} is registered already")
        self._tensors[name] = numel

    def total_tensor_floats(self) -> int:
        """The length of the destination, in floats."""
        return sum(self._tensors.values())

    def set_fused_dest(self, ptr: int) -> None:
        """Where the sums go: memory of the GPU, `total_tensor_floats` long. All processes call this together."""
        if len(self._tensors) != self._count:
            raise ValueError(f"{len(self._tensors)} of {self._count} tensors are registered")
        code = dict(_core.DTYPES)["f32"]
        entries = [(name, numel, code) for name, numel in self._tensors.items()]
        fused = (ptr, self.total_tensor_floats(), code, None)
        library = os.environ.get("DRUMLINE_CUDA_LIBRARY") or None
        self._core = _core.DeviceAsyncReduce(
            self._group, entries, fused, "sum", None, self._device, library
        )

    def async_reduce(self, stream: int, name: str, ptr: int, numel: int) -> None:
        """Brings a tensor that lies at ``ptr`` when the stream has come to where it is now. Returns at once."""
        code = dict(_core.DTYPES)["f32"]
        self._ready().async_reduce(stream, name, (ptr, numel, code, None))

    def synchronize(self, stream: int) -> None:
        """What the stream does from now on sees the sums."""
        self._ready().synchronize(stream)

    def stop(self) -> None:
        """Ends it when all processes do."""
        core, self._core = self._core, None
        if core is not None:
            core.stop()

    def _ready(self) -> _core.DeviceAsyncReduce:
        if self._core is None:
            raise ValueError("it has no destination: call set_fused_dest first, and stop last")
        return self._core


def _group(ip: str, port: int, rank: int, world_size: int) -> _core.Group:
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() == world_size:
        return core_group(None)
    group = _core.Group.init(f"tcp://{ip}:{port}?rank={rank}&world_size={world_size}")
    _exit.watch(group)
    return group


class DistributedDataParallel(ddp.DistributedDataParallel):
    """HaiScale's wrapper, with its arguments and attributes; any number of ranks per host.

    ``device`` is, as there, the number of this rank among those of its host.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        device_ids: list[int] | None = None,
        broadcast_buffers: bool = True,
        process_group: Any = None,
        find_unused_parameters: bool = False,
    ) -> None:
        if not dist.is_initialized():
            raise RuntimeError("torch.distributed is not initialized yet.")
        super().__init__(
            module,
            device_ids,
            forward_sync_buffers=broadcast_buffers,
            process_group=process_group,
            find_unused_parameters=find_unused_parameters,
        )
        self.device = _local_rank(self._group)
        self.broadcast_bucket_size = 250 << 20

    def _sync_params_and_buffers(self) -> None:
        self._broadcast([*self._parameters_in_use().values(), *self._buffers_in_use().values()])


def _local_rank(core: _core.Group) -> int:
    """How many ranks of the group on this host come before this one."""
    group = ProcessGroup(core)
    host = f"{os.uname().nodename}\n{Path('/proc/sys/kernel/random/boot_id').read_text()}"
    digest = hashlib.sha256(host.encode()).digest()[:8]
    hosts = np.zeros(group.world_size, np.uint64)
    group.all_gather(hosts, np.frombuffer(digest, np.uint64))
    return int((hosts[: group.rank] == hosts[group.rank]).sum())


def install(replace: bool = False) -> None:
    """Makes ``import haiscale.ddp``, ``import haiscale.ddp.ddp`` and ``import hfreduce.torch`` find this module, in this
    process and in those that it starts, by multiprocessing or as programs of the same Python.

    On a machine without GPUs, what HaiScale's programs ask of ``torch.cuda`` is answered with the CPU,
    and a warning says so.
    """
    for name in ("hfreduce", "haiscale"):
        if replace or (name not in sys.modules and importlib.util.find_spec(name) is None):
            _install_package(name, replace)
    stand_in()


def _install_package(name: str, replace: bool) -> None:
    folder, inherited = compat.folder(name), os.environ.get("PYTHONPATH")
    others = [it for it in (inherited or "").split(os.pathsep) if it not in ("", folder)]
    paths = [folder, *others] if replace else [*others, folder]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    if folder not in sys.path:
        sys.path.insert(0 if replace else len(sys.path), folder)
    theirs = [it for it in sys.modules if it == name or it.startswith(f"{name}.")]
    for module in theirs:
        del sys.modules[module]


def main(arguments: Sequence[str]) -> None:
    """Runs a program with these modules."""
    if not arguments:
        raise SystemExit("usage: python -m drumline.compat.haiscale PROGRAM [ARGUMENTS]")
    install()
    sys.argv = list(arguments)
    sys.path[0] = os.path.dirname(os.path.abspath(arguments[0]))
    runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    # Imports this file under its own name, so that its classes exist only once.
    importlib.import_module("drumline.compat.haiscale").main(sys.argv[1:])
