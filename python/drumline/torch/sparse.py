"""all_reduce of sparse tensors: the elements of all ranks, added in the order of ranks."""

from __future__ import annotations

import torch

from drumline import _core
from drumline.torch.tensors import Staging


def all_reduce_sparse(group: _core.Group, tensor: torch.Tensor, op: str) -> None:
    if op != "sum" or tensor.layout is not torch.sparse_coo:
        raise ValueError("drumline reduces sparse tensors of layout torch.sparse_coo by sum only")
    own = tensor.coalesce()
    shape = torch.tensor([*own.shape, own.sparse_dim(), own._nnz()], dtype=torch.int64)
    shapes = _gather(group, shape, [shape.numel()] * group.world_size)
    for rank, theirs in enumerate(shapes):
        if theirs[:-1].tolist() != shape[:-1].tolist():
            raise ValueError(
                f"all_reduce: rank {rank} passes a sparse tensor of shape "
                f"{tuple(theirs[:-2].tolist())} with {theirs[-2]} sparse dimensions, this rank one "
                f"of shape {tuple(own.shape)} with {own.sparse_dim()}"
            )
    entries = [int(theirs[-1]) for theirs in shapes]
    values = own.values()
    width = values[:1].numel() if values.numel() else int(torch.tensor(values.shape[1:]).prod())
    all_indices = _gather(
        group, own.indices(), [count * own.sparse_dim() for count in entries]
    )
    all_values = _gather(group, values, [count * width for count in entries])
    indices = torch.cat(
        [part.reshape(own.sparse_dim(), -1) for part in all_indices], dim=1
    )
    joined = torch.cat([part.reshape(-1, *values.shape[1:]) for part in all_values])
    total = torch.sparse_coo_tensor(indices, joined, own.shape).coalesce()
    with torch.no_grad():
        tensor.copy_(total)


def _gather(group: _core.Group, own: torch.Tensor, counts: list[int]) -> list[torch.Tensor]:
    parts = [torch.empty(count, dtype=own.dtype) for count in counts]
    staging = Staging()
    group.all_gather(staging.read(own), [staging.write(part) for part in parts], False)
    return parts
