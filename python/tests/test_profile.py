"""torch's profiler shows drumline's wrapper and the direct API as it shows torch's."""

from __future__ import annotations

import numpy as np
import pytest
from ranks import run
from torch_versions import EVENTS_ARE_ASYNC

torch = pytest.importorskip("torch")

import drumline  # noqa: E402


def events(profiler):
    return {event.name: (event.input_shapes, event.is_async) for event in profiler.function_events}


def profiled_calls(rank, world_size, directory):
    group = drumline.init_process_group(f"file://{directory}/store", rank=rank, world_size=world_size)
    with torch.autograd.profiler.profile(record_shapes=True, use_kineto=False) as profiler:
        drumline.all_reduce(torch.ones(2, 3))
        drumline.broadcast(np.ones(4), 0, async_op=True).wait()
        group.all_gather(np.zeros(10), np.ones(5))
        group.barrier()
        with pytest.raises(ValueError):
            group.reduce(torch.ones(2), 7)
        drumline.batch_isend_irecv(
            [drumline.P2POp(kind, np.ones(2), 1 - rank) for kind in (drumline.isend, drumline.irecv)]
        )[1].wait()
    drumline.all_reduce(torch.ones(1))  # nobody looks
    drumline.destroy_process_group()
    return {name: it for name, it in events(profiler).items() if name.startswith("drumline:")}


def test_the_direct_api_is_shown():
    for seen in run(2, profiled_calls):
        assert seen == {
            "drumline:all_reduce": ([[2, 3]], EVENTS_ARE_ASYNC),
            "drumline:broadcast": ([[4]], EVENTS_ARE_ASYNC),
            "drumline:all_gather": ([[10]], EVENTS_ARE_ASYNC),
            "drumline:barrier": ([], EVENTS_ARE_ASYNC),
            "drumline:reduce": ([[2]], EVENTS_ARE_ASYNC),
            "drumline:send": ([[2]], EVENTS_ARE_ASYNC),
            "drumline:recv": ([[2]], EVENTS_ARE_ASYNC),
        }


def profiled_steps(rank, world_size, directory):
    drumline.init_process_group(f"file://{directory}/store", rank=rank, world_size=world_size)
    model = drumline.DistributedDataParallel(torch.nn.Linear(2, 3))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward()
    model.reducer.stop()
    drumline.destroy_process_group()
    return {row.key: row.count for row in profiler.key_averages()}


def test_the_wrapper_is_shown():
    for seen in run(2, profiled_steps):
        assert seen["DistributedDataParallel.forward"] == 2, seen
        assert seen["drumline:all_reduce"] == 2, seen
