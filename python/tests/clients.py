"""Libraries on top of torch.distributed, on two ranks or four: ``python clients.py BACKENDS [WHAT ...]``, with
commas between backends. Rank 0 prints what came out of each, as JSON."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
import warnings

import torch
import torch.distributed as dist

import drumline.torch  # noqa: F401 (for torch 2.4)

CLIENTS = {}


def client(function):
    CLIENTS[function.__name__] = function
    return function


def client_since(*version):
    """A client of what older versions of torch lack."""
    known = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2]) >= version
    return client if known else lambda function: function


def model():
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))


def parallel(module, **options):
    return torch.nn.parallel.DistributedDataParallel(module, **options)


def train(module, optimizer=None, steps=3, share=None):
    """The sum of the ranks' losses in the last step. Ranks of one ``share`` see the same data."""
    optimizer = optimizer or torch.optim.SGD(module.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(dist.get_rank() if share is None else share)
    for _ in range(steps):
        loss = module(torch.randn(5, 8, generator=generator)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total.item()


@client
def ddp():
    """Losses of 50 steps; all ranks have the same bits in the end."""
    module = torch.nn.parallel.DistributedDataParallel(model(), bucket_cap_mb=0.001)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9)
    losses = [train(module, optimizer, steps=1) for _ in range(50)]
    bits = b"".join(it.detach().numpy().tobytes() for it in module.parameters())
    digests = [None] * dist.get_world_size()
    dist.all_gather_object(digests, hashlib.sha256(bits).hexdigest())
    assert len(set(digests)) == 1, digests
    return losses


@client
def ddp_once():
    return train(parallel(model()))


@client
def ddp_fp16_hook():
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    module = parallel(model())
    module.register_comm_hook(None, fp16_compress_hook)
    return train(module)


@client
def ddp_powersgd_hook():
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as hook

    module = parallel(model())
    state = hook.PowerSGDState(None, start_powerSGD_iter=2)
    module.register_comm_hook(state, hook.powerSGD_hook)
    return train(module, steps=4)


@client
def ddp_join():
    module = parallel(model())
    with module.join():
        for _ in range(2 + dist.get_rank()):
            module(torch.ones(2, 8)).sum().backward()
    return sum(it.grad.sum().item() for it in module.parameters())


@client
def ddp_buffers():
    return train(parallel(torch.nn.Sequential(model(), torch.nn.BatchNorm1d(4))))


@client_since(2, 8)  # older ones have it for GPUs alone
def fsdp2():
    from torch.distributed.fsdp import fully_shard

    module = model()
    for layer in module[::2]:
        fully_shard(layer)
    fully_shard(module)
    return train(module)


def pairs(*names):
    """The ranks in rows of two, with a name for each of both directions."""
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=names)


@client_since(2, 8)  # as fsdp2
def hsdp():
    """Ranks of a row share the parameters; rows have copies."""
    from torch.distributed.fsdp import fully_shard

    module, mesh = model(), pairs("copies", "shards")
    for layer in module[::2]:
        fully_shard(layer, mesh=mesh)
    return train(fully_shard(module, mesh=mesh))


def with_parallel_tensors(mesh):
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    return parallelize_module(model(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


@client_since(2, 5)
def tensor_parallel():
    mesh = pairs("data", "tensors")
    return train(with_parallel_tensors(mesh["tensors"]), share=mesh.get_local_rank("data"))


@client_since(2, 8)  # as fsdp2
def tensor_parallel_in_fsdp2():
    """Beside it, DDP with the same data."""
    from torch.distributed.fsdp import fully_shard

    mesh = pairs("data", "tensors")
    share = mesh.get_local_rank("data")
    module = fully_shard(with_parallel_tensors(mesh["tensors"]), mesh=mesh["data"])
    alike = parallel(model(), process_group=mesh.get_group("data"))
    return train(module, share=share), train(alike, share=share)


@client_since(2, 8)  # older ones wait for one message of a batch alone, and on gloo that hangs
def pipeline():
    """Each rank has one layer, and the batch goes through in parts."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank, ranks = dist.get_rank(), dist.get_world_size()
    layers = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(ranks)))
    stage = PipelineStage(layers[rank], rank, ranks, torch.device("cpu"))
    schedule = Schedule1F1B(stage, 2 * ranks, loss_fn=torch.nn.functional.mse_loss)
    optimizer, losses = torch.optim.SGD(layers[rank].parameters(), lr=0.1), []
    for _ in range(3):
        optimizer.zero_grad()
        inputs = (torch.randn(16, 8),) if rank == 0 else ()
        schedule.step(*inputs, **({"target": torch.ones(16, 8), "losses": losses} if rank == ranks - 1 else {}))
        optimizer.step()
    total = torch.stack(losses).sum().detach() if losses else torch.zeros(())
    dist.all_reduce(total)
    return total.item()


@client_since(2, 14)
def fsdp2_in_memory_of_the_group():
    from torch.distributed.fsdp import fully_shard

    module = fully_shard(model())
    module.set_allocate_memory_from_process_group_for_comm(True)
    return train(module)


@client
def fsdp1():
    from torch.distributed.fsdp import FullyShardedDataParallel

    return train(FullyShardedDataParallel(model(), device_id=torch.device("cpu")))


@client
def zero_optimizer():
    from torch.distributed.optim import ZeroRedundancyOptimizer

    module = parallel(model())
    return train(module, ZeroRedundancyOptimizer(module.parameters(), torch.optim.Adam, lr=0.01))


@client_since(2, 5)
def dtensor():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    matrix = distribute_tensor(torch.arange(24.0).reshape(6, 4), mesh, [Shard(0)])
    return (matrix @ matrix.t()).redistribute(mesh, [Replicate()]).to_local().sum().item()


@client
def functional_collectives():
    import torch.distributed._functional_collectives as functional

    world = dist.group.WORLD
    reduced = functional.all_reduce(torch.ones(4) * (dist.get_rank() + 1), "sum", world)
    gathered = functional.all_gather_tensor(reduced, 0, world)
    scattered = functional.reduce_scatter_tensor(gathered, "sum", 0, world)
    return reduced.tolist(), gathered.sum().item(), scattered.tolist()


@client_since(2, 8)  # older ones have it for GPUs alone
def checkpoint():
    """A sharded model and its optimizer, saved by all ranks and loaded into others."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.fsdp import fully_shard

    def new(seed):
        torch.manual_seed(seed)
        module = fully_shard(model())
        return module, torch.optim.Adam(module.parameters(), lr=0.01)

    where = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(where)
    module, optimizer = new(1)
    train(module, optimizer)
    states = dict(zip(("model", "optimizer"), get_state_dict(module, optimizer)))
    dcp.save(states, checkpoint_id=where[0])
    other, others = new(2)
    train(other, others, steps=1)
    loaded = dict(zip(("model", "optimizer"), get_state_dict(other, others)))
    dcp.load(loaded, checkpoint_id=where[0])
    set_state_dict(
        other, others, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"]
    )
    assert all(
        torch.equal(ours.to_local(), theirs.to_local())
        for ours, theirs in zip(module.parameters(), other.parameters(), strict=True)
    )
    return train(module, optimizer), train(other, others)


@client
def objects():
    gathered, scattered = [None] * dist.get_world_size(), [None]
    dist.all_gather_object(gathered, {"rank": dist.get_rank()})
    dist.scatter_object_list(scattered, [1, 2] if dist.get_rank() == 0 else None)
    return gathered, scattered[0] - dist.get_rank()


@client
def compiled():
    """Slow: torch imports its compiler."""

    @torch.compile(backend="aot_eager")
    def step(tensor):
        dist.all_reduce(tensor)
        return tensor * 2

    return step(torch.ones(3)).tolist()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    for way in sys.argv[1].split(","):
        backend, _, base = way.partition("/")
        os.environ["DRUMLINE_TORCH_BASE"] = base
        dist.init_process_group(backend)
        for name in sys.argv[2:] or CLIENTS:
            torch.manual_seed(0)
            result = CLIENTS[name]()
            if dist.get_rank() == 0:
                print(f"{way} {name}: {json.dumps(result)}", flush=True)
        if backend != "gloo":  # in torch 2.4 it waits for a thread, and the thread for the interpreter
            dist.destroy_process_group()
    # Threads of gloo's outlive its groups; one that wants the interpreter at its end aborts this.
    sys.stdout.flush()
    os._exit(0)
