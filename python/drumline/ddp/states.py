"""Makes the models of all ranks start equal: the same tensors, with rank 0's values. And sees whether they stay so."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from itertools import chain
from operator import is_, methodcaller
from typing import Any

import torch

from drumline import _core
from drumline.ddp.groups import gathered, number_of
from drumline.torch import on_device
from drumline.torch.tensors import CODE, Staging

_BYTE = CODE[torch.uint8]


def parameters_of(module: torch.nn.Module, ignored: Iterable[str]) -> dict[str, Any]:
    """All parameters by name, each once, without the ignored ones."""
    skipped = set(ignored)
    return {name: it for name, it in module.named_parameters() if name not in skipped}


def buffers_of(module: torch.nn.Module, ignored: Iterable[str]) -> dict[str, Any]:
    """All buffers by name, at this moment: modules may replace them."""
    skipped = set(ignored)
    return {name: it for name, it in module.named_buffers() if name not in skipped}


def verify(
    group: _core.Group,
    parameters: dict[str, Any],
    buffers: dict[str, Any],
    bucket_bytes: int,
    ignores_unused: bool,
    shards: tuple[int, int] | None,
) -> None:
    """If models differ, raises DrumlineError on all ranks, with the tensor and the ranks."""
    _core.verify_model(
        group,
        [_spec(name, tensor) for name, tensor in parameters.items()],
        [_spec(name, tensor) for name, tensor in buffers.items()],
        bucket_bytes,
        ignores_unused,
        shards,
    )


def _spec(name: str, tensor: Any) -> tuple[str, list[int], int]:
    # Gradients travel in the order of memory.
    if not tensor.is_contiguous():
        name = f"{name}, strides {tuple(tensor.stride())}"
    if tensor.requires_grad:
        name = f"{name}, requires_grad"
    code = CODE.get(tensor.dtype)
    if code is None:
        return f"{name}, {tensor.dtype}", [tensor.numel() * tensor.element_size()], _BYTE
    return name, list(tensor.shape), code


def broadcast(group: _core.Group, tensors: Iterable[Any], root: int = 0) -> None:
    """Gives all ranks the values of rank ``root``, without telling autograd."""
    staging = Staging()
    memories = [_bytes(staging, it.detach()) for it in tensors if it.numel() > 0]
    if root == 0:
        _core.broadcast(group, memories)
    else:
        for memory in memories:
            group.broadcast(memory, root)
    staging.finish()


def _bytes(staging: Staging, tensor: Any) -> _core.Memory:
    address, _, _, owner = staging.write(tensor)
    return address, tensor.numel() * tensor.element_size(), _BYTE, owner


class AfterForward:
    """The buffers of one rank after a forward in training. An evaluation takes them and sends nothing, so that one rank
    may evaluate alone, and all ranks evaluate the same model."""

    def __init__(self) -> None:
        # By name: what this rank had, and what the other rank had.
        self._buffers: dict[str, tuple[Any, Any]] = {}

    def receive(
        self, buffers: dict[str, Any], is_source: bool, send: Callable[[list[Any]], None]
    ) -> None:
        """All ranks get the values of the rank that is the source. ``send`` is a collective that changes tensors."""
        before = {name: it.detach().clone() for name, it in buffers.items()}
        after = before if is_source else {name: it.clone() for name, it in before.items()}
        send(list(after.values()))
        if not is_source:
            self._buffers = {
                name: (own, after[name])
                for name, own in before.items()
                # To look at what is on a GPU would wait for it.
                if own.device.type != "cpu" or not _same_bits(own, after[name])
            }

    def drop(self) -> None:
        """Forgets them."""
        self._buffers = {}

    def take(self, buffers: Callable[[], dict[str, Any]]) -> None:
        """Changes the buffers that are as they were then. Others have been set on purpose."""
        received, self._buffers = self._buffers, {}
        if not received:
            return
        now = buffers()
        for name, (own, theirs) in received.items():
            current = now.get(name)
            if current is not None and _same_bits(current, own.to(current)):
                # Without a word to autograd, whose graphs may hold the buffer.
                with torch.no_grad(), torch.inference_mode(current.is_inference()):
                    current.data.copy_(theirs)


def _same_bits(one: Any, other: Any) -> bool:
    if one.shape != other.shape:
        return False
    plain = (it.detach().resolve_conj().resolve_neg().reshape(-1) for it in (one, other))
    return torch.equal(*(it.view(torch.uint8) for it in plain))


class Layout:
    """Which parameters a module has, to notice those that it did not have when it was wrapped."""

    def __init__(self, module: torch.nn.Module, ignored: Iterable[str]) -> None:
        self._module, self._ignored = module, ignored
        self._trained = self._find()
        self._look()

    def _find(self) -> dict[int, tuple[str, Any]]:
        parameters = parameters_of(self._module, self._ignored)
        return {id(it): (name, it) for name, it in parameters.items() if it.requires_grad}

    def _look(self) -> None:
        self._frozen = [it for it in self._module.parameters() if not it.requires_grad]
        # The tables of all modules, and what stands in them: compared faster than the names are listed.
        modules = list(self._module.modules())
        self._tables = [table for it in modules for table in (it._parameters, it._modules)]
        self._lengths = list(map(len, self._tables))
        self._entries = list(self._present())

    def _present(self) -> Iterable[Any]:
        return chain.from_iterable(map(methodcaller("values"), self._tables))

    def check(self) -> None:
        """Raises if a parameter is trained that was not there, or not trained, when the module was wrapped."""
        is_same = self._lengths == list(map(len, self._tables)) and all(
            map(is_, self._entries, self._present())
        )
        if is_same and not any(it.requires_grad for it in self._frozen):
            return
        for key, (name, _) in self._find().items():
            if key not in self._trained:
                raise RuntimeError(
                    f"parameter {name} was not there or not trained when the module was wrapped, and its gradients "
                    "would not be averaged. Wrap the module anew, and after a change of it: a layer that is replaced "
                    "or no longer frozen, load_state_dict(assign=True)"
                )
        self._look()


class Comparison:
    """Compares ``parameters`` of all ranks, as an optimizer has left them, by digests of their bits.

    After the first step if ``compares_first``, and after each ``every`` steps. Ranks send their digests at the end of
    the step after that, where they meet anyhow.
    """

    def __init__(
        self,
        group: _core.Group,
        parameters: Callable[[], dict[str, Any]],
        compares_first: bool,
        every: int,
    ) -> None:
        self._group, self._parameters = group, parameters
        self.compares_first, self._every = compares_first, every
        self.is_due = False
        """Whether they are compared in the next step."""
        # After which step, and the digests of then, by name.
        self._step, self._digests = 0, dict[str, int]()
        options = gathered(group, [every, compares_first])
        if any(it != options[0] for it in options):
            raise _core.DrumlineError(
                "check_every and init_sync are the same on all ranks, and by rank these are "
                f"{options}"
            )

    def before_forward(self, steps: int) -> None:
        """A forward begins, after so many steps."""
        if self.is_due and not self._digests:
            parameters = self._parameters()
            digests = _core.digests([_on_host(it.detach()) for it in parameters.values()])
            self._step, self._digests = steps, dict(zip(parameters, digests, strict=True))

    def end_step(self, steps: int) -> None:
        """So many steps have ended. Raises DrumlineError on all ranks if parameters differ."""
        if self._group.world_size == 1:
            return
        was_due = self.is_due
        is_first = steps == 1 and self.compares_first
        self.is_due = is_first or (self._every > 0 and steps % self._every == 0)
        if was_due:
            digests, self._digests = self._digests, {}
            # A rank without data has none.
            own = number_of(list(digests.items())) if digests else 0
            of_all = [it for (it,) in gathered(self._group, [own])]
            if len(known := set(of_all) - {0}) > 1:
                self._tell(digests, [it != 0 for it in of_all])
            self.is_due = self.is_due or not known

    def _tell(self, digests: dict[str, int], has_some: list[bool]) -> None:
        names = list(digests or self._parameters())
        counts = [it for (it,) in gathered(self._group, [len(names)])]
        if len(set(counts)) > 1:
            raise _core.DrumlineError(f"ranks have different numbers of parameters now: {counts}, by rank")
        rows = gathered(self._group, [digests.get(name, 0) for name in names])
        ranks = [rank for rank, has in enumerate(has_some) if has]
        columns = [{rank: rows[rank][at] for rank in ranks} for at in range(len(names))]
        differing = [at for at, column in enumerate(columns) if len(set(column.values())) > 1]
        if not differing:
            raise _core.DrumlineError("the parameters of ranks have different names now")
        column = columns[differing[0]]
        digest, count = Counter(column.values()).most_common(1)[0]
        is_majority = 2 * count > len(ranks)
        right = digest if is_majority else column[ranks[0]]
        others = [str(rank) for rank in ranks if column[rank] != right]
        more = f", and {len(others) - 8} more" if len(others) > 8 else ""
        error = _core.DrumlineError(
            f"after step {self._step}, parameter `{names[differing[0]]}` has other values on rank "
            f"{', '.join(others[:8])}{more} than on {'most ranks' if is_majority else f'rank {ranks[0]}'} "
            f"({len(differing)} of {len(names)} parameters differ). Gradients were averaged, so what the program does "
            "beside that differs: weights loaded on one rank after the model was wrapped, another learning rate, a "
            "backward of the module inside. Parameters that are to differ are listed with "
            "_set_params_and_buffers_to_ignore_for_model"
        )
        if is_majority and len(others) == 1:
            error.culprit = self._group.ranks[int(others[0])]
        raise error


def _on_host(tensor: Any) -> _core.Memory:
    is_gpu = tensor.device.type == on_device.GPUS.kind
    host = on_device.GPUS.fetch(tensor) if is_gpu else tensor.cpu()
    host = host.contiguous().resolve_conj().resolve_neg()
    return host.data_ptr(), host.nbytes, _BYTE, host
