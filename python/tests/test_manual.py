"""The names, keywords and defaults of torch's manual, in the direct API."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from datetime import timedelta

import numpy as np
import pytest
from ranks import run, wait_for

import drumline


def connect(rank, world_size, directory, **settings):
    store = f"file://{directory}/store"
    return drumline.init_process_group(
        "drumline", init_method=store, rank=rank, world_size=world_size, **settings
    )


# Every function of the manual, with its parameters in their order.
SIGNATURES = {
    "is_available": [],
    "is_initialized": [],
    "is_mpi_available": [],
    "is_nccl_available": [],
    "is_gloo_available": [],
    "is_torchelastic_launched": [],
    "init_process_group": ["backend", "init_method", "timeout", "world_size", "rank", "store", "group_name", "pg_options"],
    "get_backend": ["group"],
    "get_rank": ["group"],
    "get_group_rank": ["group", "global_rank"],
    "get_global_rank": ["group", "group_rank"],
    "get_process_group_ranks": ["group"],
    "get_world_size": ["group"],
    "new_group": ["ranks", "timeout", "backend", "pg_options", "use_local_synchronization", "group_desc", "device_id", "sort_ranks"],
    "split_group": ["parent_pg", "split_ranks", "timeout", "pg_options", "group_desc", "backend"],
    "send": ["tensor", "dst", "group", "tag", "group_dst"],
    "recv": ["tensor", "src", "group", "tag", "group_src"],
    "isend": ["tensor", "dst", "group", "tag", "group_dst"],
    "irecv": ["tensor", "src", "group", "tag", "group_src"],
    "batch_isend_irecv": ["p2p_op_list"],
    "broadcast": ["tensor", "src", "group", "async_op", "group_src"],
    "broadcast_object_list": ["object_list", "src", "group", "device", "group_src"],
    "send_object_list": ["object_list", "dst", "group", "device", "group_dst"],
    "recv_object_list": ["object_list", "src", "group", "device", "group_src"],
    "all_reduce": ["tensor", "op", "group", "async_op"],
    "reduce": ["tensor", "dst", "op", "group", "async_op", "group_dst"],
    "all_gather": ["tensor_list", "tensor", "group", "async_op"],
    "all_gather_into_tensor": ["output_tensor", "input_tensor", "group", "async_op"],
    "all_gather_object": ["object_list", "obj", "group"],
    "gather": ["tensor", "gather_list", "dst", "group", "async_op", "group_dst"],
    "gather_object": ["obj", "object_gather_list", "dst", "group", "group_dst"],
    "scatter": ["tensor", "scatter_list", "src", "group", "async_op", "group_src"],
    "scatter_object_list": ["scatter_object_output_list", "scatter_object_input_list", "src", "group", "group_src"],
    "reduce_scatter": ["output", "input_list", "op", "group", "async_op"],
    "reduce_scatter_tensor": ["output", "input", "op", "group", "async_op"],
    "all_to_all": ["output_tensor_list", "input_tensor_list", "group", "async_op"],
    "all_to_all_single": ["output", "input", "output_split_sizes", "input_split_sizes", "group", "async_op"],
    "barrier": ["group", "async_op", "device_ids", "timeout"],
    "monitored_barrier": ["group", "timeout", "wait_all_ranks"],
    "broadcast_multigpu": ["tensor_list", "src", "group", "async_op", "src_tensor"],
    "all_reduce_multigpu": ["tensor_list", "op", "group", "async_op"],
    "reduce_multigpu": ["tensor_list", "dst", "op", "group", "async_op", "dst_tensor"],
    "all_gather_multigpu": ["output_tensor_lists", "input_tensor_list", "group", "async_op"],
    "reduce_scatter_multigpu": ["output_tensor_list", "input_tensor_lists", "op", "group", "async_op"],
}  # fmt: skip


@pytest.mark.parametrize("name", SIGNATURES)
def test_a_function_of_the_manual_has_its_parameters(name):
    assert name in drumline.__all__
    parameters = inspect.signature(getattr(drumline, name)).parameters
    assert list(parameters)[: len(SIGNATURES[name])] == SIGNATURES[name]
    # What follows is drumline's own, and has a default.
    own = list(parameters.values())[len(SIGNATURES[name]) :]
    assert all(it.default is not it.empty or it.kind is it.VAR_KEYWORD for it in own)


@pytest.mark.parametrize(
    "name", ["Backend", "ReduceOp", "reduce_op", "Store", "TCPStore", "HashStore", "FileStore", "PrefixStore"]
)
def test_a_class_of_the_manual_is_there(name):
    assert name in drumline.__all__ and getattr(drumline, name) is not None


def test_what_is_available_is_said_truly(monkeypatch):
    assert drumline.is_available()
    assert not (drumline.is_nccl_available() or drumline.is_gloo_available())
    for name in ("nccl", "gloo"):
        with pytest.raises(ValueError, match=f"{name}.* is not registered; there is drumline"):
            drumline.init_process_group(name, "tcp://127.0.0.1:0", rank=0, world_size=1)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert not drumline.is_torchelastic_launched()
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "7")
    assert drumline.is_torchelastic_launched()


class ThroughTheStore:
    """A backend in Python: every rank puts what it brings into the store, and reads what it needs."""

    def __init__(self, store, rank, world_size, timeout):
        assert timeout > timedelta(0)
        self.store, self.rank, self.world_size, self.names = store, rank, world_size, []

    def collective(self, call):
        self.names.append(call.name)
        mine = call.signature + call.input
        self.store.set(f"{call.sequence}/{self.rank}", mine)
        keys = [f"{call.sequence}/{rank}" for rank in range(self.world_size)]
        told = [bytes(self.store.get(key)) for key in keys]
        for rank, theirs in enumerate(told):
            if theirs[: len(call.signature)] != call.signature:
                raise ValueError(f"rank {rank} calls something else")
        brought = [theirs[len(call.signature) :] for theirs in told]
        if call.name in ("all_reduce", "reduce_scatter"):
            return brought
        if call.name == "broadcast":
            return brought[call.root]
        if call.name == "all_gather":
            return b"".join(brought)
        if call.name == "barrier":
            return None
        raise NotImplementedError(f"it has no {call.name}")

    def shutdown(self):
        self.names.append("shutdown")


def on_a_backend_in_python(rank, world_size, directory):
    made = []
    drumline.Backend.register_backend(
        "Mine", lambda *arguments: made.append(ThroughTheStore(*arguments)) or made[-1]
    )
    assert drumline.Backend.MINE == "mine"
    group = drumline.init_process_group(
        "MINE", f"file://{directory}/store", rank=rank, world_size=world_size
    )
    assert drumline.get_backend() == "mine"
    data = np.array([rank + 1.0, 2.0], np.float32)
    group.all_reduce(data, "avg")
    assert data.tolist() == [1.5, 2]
    work = group.broadcast(data, 1, async_op=True)
    work.wait()
    every = np.zeros(2, np.int64)
    group.all_gather(every, np.array([rank]))
    assert every.tolist() == [0, 1]
    group.barrier()
    with pytest.raises(drumline.CollectiveError, match="the backend says: .*it has no reduce") as error:
        group.reduce(data, 0)
    assert error.value.cause == "backend"
    with pytest.raises(drumline.PoisonedError):
        drumline.destroy_process_group()
    return made[0].names


def test_a_backend_may_be_written_in_python():
    names = ["all_reduce", "broadcast", "all_gather", "barrier", "reduce"]
    assert [seen[:5] for seen in run(2, on_a_backend_in_python)] == [names] * 2
    for name in ("drumline", "", "auto"):
        with pytest.raises(ValueError, match="choose another name"):
            drumline.Backend.register_backend(name, ThroughTheStore)
    with pytest.raises(ValueError, match="extended_api"):
        drumline.Backend.register_backend("mine", ThroughTheStore, extended_api=True)


def test_names_of_backends_ignore_case():
    assert drumline.Backend("DRUMLINE") == drumline.Backend.DRUMLINE == "drumline"
    with pytest.raises(ValueError, match="text"):
        drumline.Backend(7)


def calls(rank, world_size, directory):
    connect(rank, world_size, directory, timeout=timedelta(seconds=60))
    assert drumline.is_initialized()
    assert (drumline.get_rank(), drumline.get_world_size()) == (rank, world_size)
    assert drumline.get_backend() == "drumline"
    mine = np.array([rank + 1.0])

    data = mine.copy()
    assert drumline.all_reduce(tensor=data) is None
    assert data == [3]
    data = mine.copy()
    drumline.all_reduce(data, op=drumline.ReduceOp.MAX, group=None, async_op=False)
    assert data == [2]
    data = mine.copy()
    drumline.all_reduce(data, drumline.reduce_op.PRODUCT)
    assert data == [2]
    data = mine.copy()
    drumline.reduce(tensor=data, dst=1, op=drumline.ReduceOp.SUM)
    assert data == ([1], [3])[rank]
    data = mine.copy()
    drumline.broadcast(tensor=data, src=1)
    assert data == [2]
    every = [np.zeros(1) for _ in range(world_size)]
    drumline.all_gather(tensor_list=every, tensor=mine)
    assert every == [[1], [2]]
    every = [np.zeros(1) for _ in range(world_size)] if rank == 0 else None
    drumline.gather(tensor=mine, gather_list=every, dst=0)
    assert every == ([[1], [2]] if rank == 0 else None)
    data = np.zeros(1)
    drumline.scatter(tensor=data, scatter_list=[mine, mine + 4] if rank == 0 else None, src=0)
    assert data == ([1], [5])[rank]
    drumline.reduce_scatter(output=data, input_list=[mine, mine + 4])
    assert data == ([3], [11])[rank]
    outputs = [np.zeros(1), np.zeros(1)]
    drumline.all_to_all(output_tensor_list=outputs, input_tensor_list=[mine, 10 * mine])
    assert outputs == ([[1], [2]], [[10], [20]])[rank]

    objects = [None] * world_size
    drumline.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": 0}, {"rank": 1}]
    assert drumline.GroupMember.WORLD is drumline.group.WORLD is drumline._world.group_or_world(None)
    drumline.barrier()
    drumline.barrier(timeout=60.0, async_op=True).wait()
    with pytest.raises(ValueError, match="timeout"):
        drumline.barrier(timeout=timedelta(0))
    drumline.monitored_barrier()
    drumline.monitored_barrier(timeout=timedelta(seconds=60), wait_all_ranks=True)

    other = 1 - rank
    got = np.zeros(1)
    if rank == 0:
        drumline.send(mine, dst=1, tag=3)
    else:
        assert drumline.recv(got, src=0, tag=3) == 0 and got == [1]
    batch = [
        drumline.P2POp(drumline.isend, mine, other),
        drumline.P2POp(drumline.irecv, got, other, tag=0),
    ]
    for work in drumline.batch_isend_irecv(batch):
        work.wait()
    assert got == [other + 1]
    with pytest.raises(ValueError, match="isend or drumline.irecv"):
        drumline.P2POp(drumline.send, mine, other)
    with pytest.raises(ValueError, match="P2POp"):
        drumline.batch_isend_irecv([])

    everybody = drumline.new_group()
    assert (everybody.rank, everybody.world_size) == (rank, world_size)
    data = mine.copy()
    drumline.all_reduce(data, group=everybody)
    assert data == [3]
    drumline.destroy_process_group(everybody)
    # All ranks call it, members or not.
    alone = drumline.new_group([1], timeout=timedelta(seconds=60), backend="drumline")
    data = mine.copy()
    if rank == 1:
        drumline.all_reduce(data, group=alone)
        assert drumline.get_rank(alone) == 0
        alone.destroy()
    else:
        assert alone is drumline.GroupMember.NON_GROUP_MEMBER
        assert (drumline.get_rank(alone), drumline.get_world_size(alone)) == (-1, -1)
        with pytest.warns(UserWarning, match="all_reduce does nothing: this rank is not in the group"):
            assert drumline.all_reduce(data, group=alone) is None
        for call in (drumline.get_backend, drumline.get_process_group_ranks, lambda it: drumline.get_group_rank(it, 1)):
            with pytest.raises(ValueError, match="not in the group"):
                call(alone)
        with pytest.warns(UserWarning, match="this rank is not in the group"):
            assert drumline.recv(data, src=1, group=alone) == -1
        with pytest.raises(ValueError, match="not in the group"):
            drumline.split_group(alone, [[0]])
        drumline.destroy_process_group(alone)
    assert data == mine
    with pytest.raises(ValueError, match="'drumline', and not 'gloo'"):
        drumline.new_group(backend="gloo")
    for ranks in ([0, 0], [2], [-1], np.array([0, 2])):
        with pytest.raises(ValueError):
            drumline.new_group(ranks)
    for lists in (None, [], [[]], [[0, 0]], [[0], [1, 0]], [[2]], [[-1]]):
        with pytest.raises(ValueError):
            drumline.split_group(split_ranks=lists)
    halves = drumline.split_group(None, [[0]])
    assert (halves.ranks == [0]) if rank == 0 else halves is drumline.GroupMember.NON_GROUP_MEMBER
    with pytest.raises(TypeError, match="drumline.init_process_group or drumline.new_group"):
        drumline.all_reduce(data, group="world")
    with pytest.raises(TypeError):
        drumline.broadcast(data, 0.0)
    drumline.destroy_process_group()


def test_the_calls_of_the_manual():
    run(2, calls)


def futures(rank, world_size, directory):
    group = connect(rank, world_size, directory)
    strided = np.zeros((4, 2))[:, 0]
    strided[:] = rank + 1
    work = drumline.all_reduce(tensor=strided, async_op=True)
    future = work.get_future()
    assert work.get_future() is future
    doubled = future.then(lambda ended: 2 * ended.value()[0])
    assert doubled.wait().tolist() == [6] * 4
    assert future.done() and future.wait()[0] is strided and work.is_completed()
    assert strided.tolist() == [3] * 4 and not future.cancel()
    failing = future.then(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        failing.wait()
    # An error arrives through the future.
    late = group.irecv(np.zeros(1), 1 - rank)
    pending = late.get_future()
    if not pending.done():
        with pytest.raises(RuntimeError, match="has not ended yet"):
            pending.value()
    # Both ranks wait for a message, and no other call runs, when one of them aborts.
    open(os.path.join(directory, f"pending-{rank}"), "w").close()
    wait_for(os.path.join(directory, f"pending-{1 - rank}"))
    group.abort()
    with pytest.raises(drumline.CollectiveError):
        pending.wait()
    return True


def test_a_work_has_a_future():
    assert run(2, futures) == [True] * 2


def lists(rank, world_size, directory):
    connect(rank, world_size, directory)
    for is_async in (False, True):
        def done(work, is_async=is_async):
            assert (work is not None) == is_async
            if work is not None:
                work.wait()

        # Rank r has the arrays [2r + 1] and [2r + 2].
        def mine():
            return [np.array([2.0 * rank + n]) for n in (1, 2)]

        data = mine()
        done(drumline.all_reduce_multigpu(data, async_op=is_async))
        assert data == [[10], [10]]
        data = mine()
        done(drumline.all_reduce_multigpu(data, "avg", async_op=is_async))
        assert data == [[2.5], [2.5]]
        data = mine()
        done(drumline.reduce_multigpu(data, 1, drumline.ReduceOp.MAX, async_op=is_async, dst_tensor=1))
        assert data == ([[1], [2]], [[3], [4]])[rank]
        data = mine()
        done(drumline.broadcast_multigpu(data, 0, async_op=is_async, src_tensor=1))
        assert data == [[2], [2]]
        every = [[np.zeros(1) for _ in range(4)] for _ in range(2)]
        done(drumline.all_gather_multigpu(every, mine(), async_op=is_async))
        assert every == [[[1], [2], [3], [4]]] * 2
        out = [np.zeros(1), np.zeros(1)]
        inputs = [[10 * n + it for n in range(4)] for it in mine()]
        done(drumline.reduce_scatter_multigpu(out, inputs, async_op=is_async))
        assert out == [[10 + 40 * (2 * rank + n)] for n in range(2)]
    with pytest.raises(ValueError, match="all_reduce_multigpu"):
        drumline.all_reduce_multigpu([])
    with pytest.raises(ValueError, match="all_reduce_multigpu: "):
        drumline.all_reduce_multigpu([np.zeros(1), np.zeros(2)])
    with pytest.raises(ValueError, match="premul_sum"):
        drumline.all_reduce_multigpu(mine(), ("premul_sum", 2.0))
    drumline.destroy_process_group()


def test_the_forms_for_lists():
    run(2, lists)


def operators_of_torch(rank, world_size, directory):
    torch = pytest.importorskip("torch")
    import torch.distributed as dist

    connect(rank, world_size, directory)
    results = []
    ops = [dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MIN, "SUM", "Max", ("PREMUL_SUM", 2.0)]
    ops += [dist._make_nccl_premul_sum(2.0), dist.ReduceOp(dist.ReduceOp.PRODUCT)]
    for op in ops:
        data = np.array([rank + 1.0])
        drumline.all_reduce(data, op)
        results.append(data.item())
    for wrong in ("mean", dist.ReduceOp.PREMUL_SUM, 7, None, ("sum",)):
        with pytest.raises(ValueError):
            drumline.all_reduce(np.ones(1), wrong)
    tensor = torch.ones(2)
    work = drumline.all_reduce(tensor, dist.ReduceOp.SUM, async_op=True)
    assert work.get_future().wait()[0] is tensor and tensor.tolist() == [2, 2]
    drumline.destroy_process_group()
    return results


def test_operators_of_torch_and_names_in_any_case_are_taken():
    pytest.importorskip("torch")
    assert run(2, operators_of_torch) == [[3, 1.5, 1, 3, 2, 6, 6, 2]] * 2


def test_there_is_one_way_to_meet(tmp_path):
    store = drumline.HashStore()
    with pytest.raises(ValueError, match="no init_method"):
        drumline.init_process_group(init_method="env://", store=store, rank=0, world_size=1)
    with pytest.raises(ValueError, match="two init_methods"):
        drumline.init_process_group("env://", "env://")
    with pytest.raises(ValueError, match="rank and world_size"):
        drumline.init_process_group(store=store, rank=0)


def test_the_only_rank_needs_no_address(monkeypatch):
    for name in ("MASTER_ADDR", "MASTER_PORT", "DRUMLINE_STORE", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="MASTER_ADDR.*MASTER_PORT"):
        drumline.init_process_group()
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setattr("drumline._world._world", None)  # other tests of this process have no group
    with drumline.init_process_group() as group:
        assert (group.rank, group.world_size) == (0, 1)


def test_errors_name_only_what_python_has():
    sampler = drumline.DistributedSampler(range(4), 2, 0)
    with pytest.raises(ValueError) as error:
        sampler.load_state_dict(drumline.DistributedSampler(range(8), 2, 0).state_dict())
    assert str(error.value).startswith("load_state_dict: "), error.value
    with pytest.raises(ValueError) as error:
        drumline.init_process_group("teleport", "tcp://127.0.0.1:0", rank=0, world_size=1)
    assert "Backend.register_backend" in str(error.value) and "::" not in str(error.value)


def test_the_names_come_without_torch():
    program = "import sys, drumline; [getattr(drumline, it) for it in drumline.__all__]; assert 'torch' not in sys.modules"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, env={**os.environ}
    )
    assert done.returncode == 0, done.stderr
