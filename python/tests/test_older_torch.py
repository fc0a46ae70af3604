"""What the newest torch has and older ones lack: they are told so, or what they need is done."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
from torch_versions import BASES, needs_backends

torch = pytest.importorskip("torch")

# One that is too old, or says so.
TOO_OLD = """
import os, sys, warnings
import torch, torch.distributed as dist
dist.Backend._plugins.pop("DRUMLINE")
del dist.Backend.DRUMLINE
torch.__version__ = "2.3.1+cpu"
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    os.environ["DRUMLINE_REPLACE_GLOO"] = "1"
    import drumline.ddp
print(*(it.message for it in said))
from drumline.torch.register import register
for ask in (
    register,
    lambda: dist.init_process_group("drumline", store=dist.HashStore(), rank=0, world_size=1),
):
    try:
        ask()
    except ImportError as error:
        print(error)
"""


def said(program: str, **environment: str) -> list[str]:
    command = [sys.executable, "-c", program]
    settings = {**os.environ, **environment}
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=settings)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@needs_backends
@pytest.mark.skipif(torch.__version__ < "2.5", reason="this torch registers nothing that could be taken back")
def test_who_asks_for_the_backend_is_told_what_torch_lacks():
    lines = said(TOO_OLD)
    assert len(lines) == 3, lines
    for line in lines:
        assert "needs torch 2.4 or newer, and this is 2.3.1" in line, line
    assert "cannot take the place of gloo" in lines[0]


AFTER_AN_IMPORT = """
import torch.distributed as dist
assert "DRUMLINE" not in dist.Backend._plugins
import drumline.torch
dist.init_process_group("drumline", store=dist.HashStore(), rank=0, world_size=1)
print(dist.get_backend())
"""


@needs_backends
def test_where_torch_loads_nothing_by_itself_an_import_does():
    assert said(AFTER_AN_IMPORT, TORCH_DEVICE_BACKEND_AUTOLOAD="0") == ["drumline"]


WRONG_BASE = """
import torch.distributed as dist
import drumline.torch
try:
    dist.init_process_group("drumline", store=dist.HashStore(), rank=0, world_size=1)
except ValueError as error:
    print(error)
"""


@needs_backends
def test_a_wrong_base_is_refused():
    told = "DRUMLINE_TORCH_BASE is backend or process-group, and not 'group'"
    assert said(WRONG_BASE, DRUMLINE_TORCH_BASE="group") == [told]
    if BASES == ["process-group"]:
        assert "=backend needs torch 2.14" in said(WRONG_BASE, DRUMLINE_TORCH_BASE="backend")[0]


class Handle:
    """A call of the core."""

    def __init__(self):
        self.ended, self.asked = False, False

    def is_completed(self):
        return self.ended

    def error(self):
        self.asked = True


@needs_backends
def test_a_work_for_which_nobody_waits_keeps_its_tensors_until_16_newer_have_come():
    from drumline.torch.kept import RECENT, KeptWorks
    from drumline.torch.tensors import Staging
    from drumline.torch.work import DrumlineWork

    kept = KeptWorks()
    handles = {name: Handle() for name in ("ended", "runs", "held", "strided")}
    for name, handle in handles.items():
        handle.ended = name != "runs"
    tensors = {name: torch.zeros(2) for name in handles}
    strided = Staging()
    strided.write(torch.zeros(4)[::2])
    for name, handle in handles.items():
        staging = strided if name == "strided" else Staging()
        work = kept.add(DrumlineWork(name, [handle], staging, [tensors[name]]))
        if name == "held":
            held = work
    del work

    def with_tensors() -> set[str]:
        works = [*kept._recent, *kept._with_tensors, *kept._without]
        return {it._title for it in works if it._result and it._title in handles}

    def later(count: int) -> None:
        for _ in range(count):
            kept.add(DrumlineWork("later", [], Staging(), [torch.zeros(1)]))

    later(RECENT - len(handles))
    assert with_tensors() == set(handles)
    later(2 * len(handles))
    assert with_tensors() == {"runs", "held", "strided"}
    assert handles["ended"].asked
    assert held.result()[0] is tensors["held"]
    handles["runs"].ended = True
    del held
    later(2 * len(handles))
    assert with_tensors() == {"strided"}, "it may be copied back yet"
    assert any(it._title == "ended" for it in kept._without), "C++ may wait for it"


@needs_backends
def test_backends_of_other_devices_are_made_as_torch_makes_them():
    import torch.distributed as dist

    from drumline.torch.elsewhere import elsewhere

    place = SimpleNamespace(store=dist.HashStore(), rank=0, ranks=[0], name="alone", timeout=dist.default_pg_timeout)
    assert elsewhere(place, {"cpu": "drumline", "cuda": "drumline"}, None) == {}
    with pytest.raises((ValueError, RuntimeError)):
        elsewhere(place, {"cpu": "drumline", "cuda": "mpi"}, None)
