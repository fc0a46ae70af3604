"""Numbers of ranks in groups of some ranks mean what they mean in torch: beside torch on gloo, and torch on drumline."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from ranks import run

import drumline

torch = pytest.importorskip("torch")
import torch._dynamo  # noqa: E402, F401 (DDP imports it, for seconds: once, for all forks)
import torch.distributed as dist  # noqa: E402

RANKS = 3
MEMBERS = ([1, 2], [2, 0], [1])
# Every way to name a rank, right and wrong: by its number in the job, in the group, both, none.
NUMBERS = (0, 1, 2, np.int64(1), np.int32(2), 3, -1, np.int64(-1))


def seen(call):
    """What a call returns, or the class of what it raises."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return call()
        except Exception as error:
            return type(error).__name__


def rooted(api, group, rank):
    """Every call with a root. Only those arrays are told that the call defines."""
    size = api.get_world_size(group)

    def own():
        return torch.tensor([10.0 * rank, 1.0])

    def broadcast(**at):
        x = own()
        api.broadcast(x, group=group, **at)
        return x.tolist()

    def reduce(**at):
        x = own()
        api.reduce(x, group=group, **at)
        return x.tolist() if is_root(at) else None

    def gather(**at):
        every = [torch.zeros(2) for _ in range(size)] if is_root(at) else None
        api.gather(own(), every, group=group, **at)
        return every and [it.tolist() for it in every]

    def scatter(**at):
        every = [torch.tensor([100.0 * rank + n, 1.0]) for n in range(size)] if is_root(at) else None
        x = own()
        api.scatter(x, every, group=group, **at)
        return x.tolist()

    def gather_object(**at):
        every = [None] * size if is_root(at) else None
        api.gather_object({"rank": rank}, every, group=group, **at)
        return every

    def broadcast_object_list(**at):
        objects = [rank, "x"]
        api.broadcast_object_list(objects, group=group, **at)
        return objects

    def scatter_object_list(**at):
        out = [None]
        every = [(rank, n) for n in range(size)] if is_root(at) else None
        api.scatter_object_list(out, every, group=group, **at)
        return out

    def is_root(at):
        at = [*at.items()] or [("src", 0)]
        if len(at) == 2:
            return False
        [(name, number)] = at
        return number == (api.get_rank(group) if name.startswith("group_") else rank)

    calls = [broadcast, reduce, gather, scatter, gather_object, broadcast_object_list, scatter_object_list]
    told = {}
    for call in calls:
        name = "dst" if call in (reduce, gather, gather_object) else "src"
        ways = [{name: number} for number in NUMBERS] + [{f"group_{name}": n} for n in range(size)]
        ways += [{}, {name: 1, f"group_{name}": 0}]
        for way in ways:
            told[f"{call.__name__} {way}"] = seen(lambda call=call, way=way: call(**way))
    return told


def sender_of(work):
    return work.source_rank() if isinstance(work, drumline.Work) else work._source_rank()


def messages(api, group, rank):
    """Around the ring of a group, with every way to name both ends. A blocking send to oneself is refused by torch."""
    ranks, own = api.get_process_group_ranks(group), api.get_rank(group)
    after, before = (own + 1) % len(ranks), (own - 1) % len(ranks)
    told = {}
    for tag, (to, source) in enumerate(
        [
            ({"dst": ranks[after]}, {"src": ranks[before]}),
            ({"dst": np.int64(ranks[after])}, {"src": np.int64(ranks[before])}),
            ({"group_dst": after}, {"group_src": before}),
            ({"dst": ranks[after]}, {}),
        ]
    ):
        x = torch.zeros(1)
        sent = api.isend(torch.tensor([rank + 0.5]), group=group, tag=tag, **to)
        told[f"recv {tag}"] = int(api.recv(x, group=group, tag=tag, **source)), x.item()
        sent.wait()
        x = torch.zeros(1)
        works = [api.irecv(x, group=group, tag=tag, **source), api.isend(torch.tensor([rank + 0.25]), group=group, tag=tag, **to)]
        for work in works:
            work.wait()
        told[f"irecv {tag}"] = x.item(), None if source else sender_of(works[0])
        [[name, number]] = to.items()
        peer = {"group_peer" if name == "group_dst" else "peer": number}
        back = {"group_peer": before} if name == "group_dst" else {"peer": ranks[before]}
        batch = [api.P2POp(api.irecv, x, group=group, **back), api.P2POp(api.isend, torch.tensor([rank + 0.75]), group=group, **peer)]
        for work in api.batch_isend_irecv(batch):
            work.wait()
        told[f"batch {tag}"] = x.item(), [(int(it.peer), int(it.group_peer)) for it in batch]
    if own == 0:
        api.send_object_list([rank, "x"], ranks[after], group=group)
    elif own == 1:
        objects = [None, None]
        told["objects"] = api.recv_object_list(objects, ranks[before], group=group), objects
    for number in NUMBERS:
        if number not in ranks:
            for call in (api.send, api.isend, api.recv, api.irecv):
                told[f"{call.__name__} {number}"] = seen(lambda call=call, n=number: call(torch.zeros(1), n, group=group))
            told[f"P2POp {number}"] = seen(lambda n=number: api.P2POp(api.isend, torch.zeros(1), n, group))
    for call in (api.send, api.isend):
        told[f"{call.__name__} without"] = seen(lambda call=call: call(torch.zeros(1), group=group))
    for call, name in [(api.send, "dst"), (api.isend, "dst"), (api.recv, "src"), (api.irecv, "src")]:
        both = {name: ranks[after], f"group_{name}": after}
        told[f"{call.__name__} both"] = seen(lambda call=call, both=both: call(torch.zeros(1), group=group, **both))
    return told


def translated(api, group):
    ranks = api.get_process_group_ranks(group)
    told = {"ranks": ranks, "rank": api.get_rank(group), "size": api.get_world_size(group)}
    for number in (0, 1, 2, np.int64(2)):
        told[f"group_rank {number}"] = seen(lambda n=number: api.get_group_rank(group, n))
        told[f"global_rank {number}"] = seen(lambda n=number: api.get_global_rank(group, n))
    return told


def in_one_piece(api, group, rank):
    """The calls on one tensor with a block for each rank."""
    size, own = api.get_world_size(group), api.get_rank(group)
    told = {}
    for shape, of_one in (((2 * size,), 2), ((size, 2), (1, 2))):
        every = torch.zeros(shape)
        api.all_gather_into_tensor(every, torch.tensor([1.0, rank]).reshape(of_one), group=group)
        part = torch.zeros(of_one)
        api.reduce_scatter_tensor(part, torch.arange(2.0 * size).reshape(shape) * (rank + 1), group=group)
        blocks = torch.zeros(shape)
        work = api.all_to_all_single(blocks, torch.arange(2.0 * size).reshape(shape) + 10 * rank, group=group, async_op=True)
        work.wait()
        told[f"{shape}"] = every.tolist(), part.tolist(), blocks.tolist()
    # Rank i of the group sends i + j rows to rank j.
    sizes = [own + other for other in range(size)]
    blocks = torch.zeros(sum(sizes), 2)
    rows = torch.arange(2.0 * sum(sizes)).reshape(-1, 2) + 100 * rank
    api.all_to_all_single(blocks, rows, sizes, sizes, group=group)
    told["rows"] = blocks.tolist()
    for wrong in ([1] * (size + 1), [-1] * size, [sum(sizes) + 1] * size):
        told[f"{wrong}"] = isinstance(seen(lambda wrong=wrong: api.all_to_all_single(blocks, rows, sizes, wrong, group=group)), str)
    return told


def split(api, rank):
    part = api.split_group(split_ranks=[[2, 0], [1]])
    x = torch.tensor([float(rank)])
    api.broadcast(x, group_src=0, group=part)
    outside = api.split_group(split_ranks=[[1]]) is api.GroupMember.NON_GROUP_MEMBER
    return {"split": (api.get_process_group_ranks(part), x.item(), outside, seen(lambda: api.split_group(split_ranks=[])))}


def model_of(kind, group, rank):
    """Whose parameters and buffers a wrapped model begins with, and whose buffers a forward takes."""
    module = torch.nn.BatchNorm1d(1)
    for tensor in (module.weight.data, module.running_mean):
        tensor.fill_(float(rank))
    model = kind(module, process_group=group)
    told = module.weight.item(), module.running_mean.item()
    module.running_mean.fill_(10.0 + rank)
    module.momentum = 0.0
    model(torch.ones(2, 1))
    return *told, module.running_mean.item()


def beside_torch(rank, world_size, directory):
    from drumline.compat import haiscale

    dist.init_process_group("gloo", f"file://{directory}/gloo", rank=rank, world_size=world_size)
    drumline.init_process_group(f"file://{directory}/ours", rank=rank, world_size=world_size)
    told = []
    for members, in_order in [(it, True) for it in MEMBERS] + [([2, 0], False)]:
        options = {} if in_order else {"sort_ranks": False}
        groups = [
            ("gloo", dist, dist.new_group(members, backend="gloo", **options)),
            ("torch", dist, dist.new_group(members, backend="drumline", **options)),
            ("ours", drumline, drumline.new_group(members, **options)),
        ]
        if rank not in members:
            continue
        column = {}
        for name, api, group in groups:
            column[name] = rooted(api, group, rank) | translated(api, group) | in_one_piece(api, group, rank)
            if len(members) > 1:
                column[name] |= messages(api, group, rank)
            kinds = [drumline.DistributedDataParallel, haiscale.DistributedDataParallel]
            models = [model_of(kind, group, rank) for kind in [torch.nn.parallel.DistributedDataParallel][name != "gloo" :] + kinds]
            assert models == models[:1] * len(models), (members, name, models)
            column[name]["model"] = models[0]
        told.append((members, in_order, column))
    whole = {name: rooted(api, None, rank) | split(api, rank) for name, api in (("gloo", dist), ("ours", drumline))}
    told.append(("the job", True, whole))
    dist.destroy_process_group()
    drumline.destroy_process_group()
    return told


def test_a_rank_is_named_as_in_torch():
    outcomes = run(RANKS, beside_torch)
    checked = 0
    for rank, told in enumerate(outcomes):
        for members, in_order, column in told:
            for name in column.keys() - {"gloo"}:
                for call, expected in column["gloo"].items():
                    found = column[name][call]
                    # A number that no rank of the job has is refused by torch's C++ there, with another class.
                    is_same = found == expected or (members == "the job" and isinstance(expected, str) and isinstance(found, str))
                    assert is_same, (rank, members, in_order, name, call, found, expected)
                    checked += 1
    assert checked > 1000
    # What torch says is not what a number in the group would mean.
    [column] = [column for members, in_order, column in outcomes[2] if members == [1, 2]]
    assert column["ours"]["broadcast {'src': 1}"] == [10, 1] and column["ours"]["broadcast {'src': 0}"] == "ValueError"
    assert column["ours"]["broadcast {'group_src': 1}"] == [20, 1] and column["ours"]["model"] == (1, 1, 11)
