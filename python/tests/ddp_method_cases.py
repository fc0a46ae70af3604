"""More cases: the methods of the wrapper. See `ddp_cases`."""

from __future__ import annotations

import copy
import pickle

import torch
import torch.distributed as dist
from ddp_cases import Counting, Maybe, batch, case, count, evaluated, grads, layers, line, normal, raised, state, step
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Join


def _uneven(model, at, batches, every=1, context=None):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with context if context is not None else model.join():
        for index in range(batches):
            steps = (index + 1) % every == 0
            with torch.enable_grad() if steps else model.no_sync():
                step(model, at)
            if steps:
                optimizer.step()
                optimizer.zero_grad()
    return state(model)


@case
def join(wrap, at):
    seen = [_uneven(wrap(normal()), at, 1 + at.rank)]
    model = wrap(normal())
    return [*seen, _uneven(model, at, 2 - at.rank % 2, 1, model.join(divide_by_initial_world_size=False))]


@case
def join_and_no_sync(wrap, at):
    return _uneven(wrap(normal()), at, 2 + 2 * at.rank, 2)


@case
def join_of_a_rank_that_ends_between_two_steps(wrap, at):
    """torch's drops what this rank has added up. Here it takes part in the next average."""
    return _uneven(wrap(layers()), at, 3 if at.rank == 0 else 4, 2)


@case
def join_twice_with_one_context(wrap, at):
    model = wrap(layers())
    context = model.join()
    return [_uneven(model, at, 1 + at.rank, 1, context) for _ in range(2)]


@case
def join_not_enabled(wrap, at):
    model = wrap(layers())
    return _uneven(model, at, 2, 1, model.join(enable=False))


@case
def join_that_throws(wrap, at):
    model = wrap(layers())
    return raised(_uneven, model, at, 1 + at.rank, 1, model.join(throw_on_early_termination=True))


@case
def join_with_find_unused_parameters_and_a_static_graph(wrap, at):
    seen = []
    for options in ({"find_unused_parameters": True}, {"static_graph": True}):
        model = wrap(Maybe(), **options)
        with model.join():
            for _ in range(2 + at.rank):
                step(model, at, False)
        seen.append(state(model))
    return seen


@case
def join_with_a_hook(wrap, at):
    model = wrap(layers())
    model.register_comm_hook(None, _sum)
    return _uneven(model, at, 1 + at.rank, 1, model.join(divide_by_initial_world_size=False))


@case
def Join_of_torch(wrap, at):
    model = wrap(normal())
    return _uneven(model, at, 1 + at.rank, 1, Join([model]))


@case
def Join_without_data_at_all(wrap, at):
    model = wrap(layers())
    return _uneven(model, at, 0 if at.rank == 0 else 2, 1, Join([model]))


@case
def what_Join_asks_for(wrap, at):
    model = wrap(layers())
    hook = model.join_hook(divide_by_initial_world_size=False)
    names = [hasattr(hook, it) for it in ("main_hook", "post_hook")]
    return str(model.join_device), model.join_process_group is dist.group.WORLD, names


def _sum(state, bucket):
    return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda it: it.value()[0])


def _without_a_name(state, grads):
    return _sum(state, grads)


def _wrong_types(state, bucket: int) -> int:
    return _sum(state, bucket)


def _no_future(state, bucket):
    return bucket.buffer()


def _raises(state, bucket):
    raise ValueError("a hook")


def _with_hook(wrap, at, hook, group=None):
    model = wrap(layers(), process_group=group)
    model.register_comm_hook(None, hook)
    return step(model, at), step(model, at)


@case
def comm_hooks(wrap, at):
    return [_with_hook(wrap, at, it) for it in (_sum, default_hooks.allreduce_hook, default_hooks.fp16_compress_hook)]


@case
def comm_hook_that_sends_nothing(wrap, at):
    return _with_hook(wrap, at, default_hooks.noop_hook)


@case
def comm_hook_that_is_no_function(wrap, at):
    wrap(layers()).register_comm_hook(None, 7)


@case
def comm_hook_registered_twice(wrap, at):
    model = wrap(layers())
    model.register_comm_hook(None, _sum)
    model.register_comm_hook(None, _sum)


@case
def comm_hook_with_another_name_for_its_bucket(wrap, at):
    """torch's raises KeyError. Here any function of two arguments will do."""
    return _with_hook(wrap, at, _without_a_name)


@case
def comm_hook_with_other_annotations(wrap, at):
    """torch's raises ValueError. Here annotations do not count, since the bucket is another class."""
    return _with_hook(wrap, at, _wrong_types)


@case
def comm_hook_that_returns_no_future(wrap, at):
    """torch's raises RuntimeError. Here TypeError says what the hook has returned."""
    # A group of its own, since drumline's ends with it.
    _with_hook(wrap, at, _no_future, dist.new_group())


@case
def comm_hook_that_raises(wrap, at):
    _with_hook(wrap, at, _raises, dist.new_group())


@case
def builtin_comm_hooks(wrap, at):
    seen = []
    for kind in (dist.BuiltinCommHookType.ALLREDUCE, dist.BuiltinCommHookType.FP16_COMPRESS):
        model = wrap(layers())
        model._register_builtin_comm_hook(kind)
        seen.append((step(model, at), raised(model._register_builtin_comm_hook, kind)))
    return seen


@case
def fused_optimizer(wrap, at):
    """torch's steps inside of backward. Here gradients are not averaged yet there, and the error says so."""
    model = wrap(layers())
    model._register_fused_optim(torch.optim.SGD, lr=0.1)


@case
def will_sync_module_buffers(wrap, at):
    """torch's says what the forward before has left to do. Here it says what a forward now would do."""
    model, seen = wrap(Counting(at)), []
    seen.append(model.will_sync_module_buffers())
    with torch.no_grad():
        seen.append(model.will_sync_module_buffers())
    with model.no_sync():
        seen.append(model.will_sync_module_buffers())
    return [*seen, wrap(layers()).will_sync_module_buffers()]


@case
def buffer_comm_hook(wrap, at):
    def hook(state, named):
        state.append(sorted(named))
        for buffer in named.values():
            dist.all_reduce(buffer)

    where, seen = torch.nn.parallel.distributed._BufferCommHookLocation, []
    for location in (where.PRE_FORWARD, where.POST_FORWARD):
        model, names = wrap(Counting(at), broadcast_buffers=True), []
        model._register_buffer_comm_hook(names, hook, location)
        step(model, at)
        seen.append((count(model), names))
    return seen


@case
def buffer_comm_hook_that_is_no_function(wrap, at):
    """torch's raises AssertionError. Here it is TypeError, as for other hooks."""
    wrap(Counting(at))._register_buffer_comm_hook(None, 7)


@case
def inputs_for_a_device(wrap, at):
    model, x = wrap(layers()), torch.ones(2, 2)
    moved = model.to_kwargs((x, [x]), {"a": x, "b": 1}, 0)
    return [str(moved), raised(model.scatter, (x,), {}, ["cpu"]), raised(model.gather, [x, x], "cpu")]


@case
def state_dicts(wrap, at):
    model, other = wrap(normal()), wrap(normal())
    step(model, at)
    other.load_state_dict(model.state_dict())
    return [list(state(other)), state(other) == state(model), raised(model.load_state_dict, {})]


@case
def copies(wrap, at):
    model = wrap(layers())
    with model.no_sync():
        pass
    return [step(it, at) for it in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)))]


@case
def a_copy_on_rank_0_alone(wrap, at):
    model = wrap(normal())
    step(model, at)
    evaluated(model, at)
    seen = None
    if at.rank == 0:
        average = copy.deepcopy(model)
        pickle.dumps(model)
        seen = evaluated(average.module, at), state(average)
    return seen, step(model, at)


@case
def a_copy_of_a_model_on_another_group(wrap, at):
    return raised(copy.deepcopy, wrap(layers(), process_group=at.pair)) if at.rank < 2 else None


@case
def ignored_parameters_and_buffers(wrap, at):
    module = normal()
    module[0].bias.data.fill_(at.rank)
    module[1].running_mean.fill_(at.rank)
    wrap._set_params_and_buffers_to_ignore_for_model(module, ["0.bias", "1.running_mean"])
    model = wrap(module)
    begins = module[0].bias.tolist(), module[1].running_mean.tolist()
    gradients = step(model, at)
    return begins, gradients[0], len(gradients[1]), model.parameters_to_ignore


@case
def an_ignored_parameter_of_the_outermost_module(wrap, at):
    """torch's averages its gradient, unless the name begins with a dot. Here one name counts for all."""
    module = line()
    wrap._set_params_and_buffers_to_ignore_for_model(module, ["weight"])
    module.register_parameter("more", torch.nn.Parameter(torch.ones(1)))
    model = wrap(module)
    (model(batch(at)) * module.more).sum().backward()
    return grads(model)


@case
def logging_data(wrap, at):
    """torch's tells of its buckets. Here each step forms them anew, and there is only `bucket_cap_bytes`."""
    model = wrap(layers())
    step(model, at)
    data = model._get_ddp_logging_data()
    model._set_ddp_runtime_logging_sample_rate(1)
    names = [it for it in data if it.startswith(("bucket", "num_", "rebuilt"))]
    return sorted(names), raised(model._set_ddp_runtime_logging_sample_rate, 0)


@case
def finalize_backward(wrap, at):
    model = wrap(layers())
    seen = [raised(model.finalize_backward)]
    model.require_manual_backward_finalization = True
    seen.append(raised(model.finalize_backward))
    step(model, at)
    model.finalize_backward()
    seen += [grads(model), raised(model._check_reducer_finalized), model.should_finalize_after_backward]
    with model.no_sync():
        step(model, at)
        seen.append(raised(model.finalize_backward))
    return seen


@case
def another_group_later(wrap, at):
    model = wrap(layers())
    step(model, at)
    model._update_process_group(at.pair)
    model.zero_grad()
    return step(model, at) if at.rank < 2 else None


@case
def clones_of_outputs(wrap, at):
    model = wrap(layers())
    model._set_ddp_sink_clone(False)
    return step(model, at)
