"""The command lines of command_lines.py under torchrun and under `drumline run`: what the ranks get, how the job ends,
what is shown and which files are there must be the same, but for what docs/reference/launcher.md says.

Some lines always run. `make command-lines` runs the slow ones, too.
"""

from __future__ import annotations

import fnmatch
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from command_lines import ALWAYS, LINES, Differs, Line
from torch_versions import needs_torchrun

TOLD = Path(__file__).with_name("told.py")
PAGE = Path(__file__).parents[2] / "docs/reference/launcher.md"
LAUNCHERS = {
    "torchrun": [sys.executable, "-m", "torch.distributed."],
    "drumline": [str(Path(sys.executable).with_name("drumline")), ""],
}
LIMIT_S = 240
# A launcher that was killed leaves it to others to end its ranks.
PATIENCE_S = 5

# What told.py prints, behind what a launcher puts in front.
RANKS_LINE = r"^(?:\[\S+\]:? ?)?((?:\S.*)?\b(?:out|err) \d+)$"

Outcome = dict[str, object]


def outcome(launcher: str, line: Line, folder: Path, port: int) -> Outcome:
    """Runs the line, on as many hosts as it asks for, and flattens what came of it."""
    told, temporary = folder / "told", folder / "tmp"
    for made in (folder, told, temporary):
        made.mkdir()
    places = {"told": TOLD, "python": sys.executable, "port": port, "folder": folder}
    *command, prefix = LAUNCHERS[launcher]
    jobs = []
    for host in range(line.hosts):
        filled = partial(fill, {**places, "host": host})
        with (folder / f"stdout {host}").open("w") as out, (folder / f"stderr {host}").open("w") as err:
            jobs.append(subprocess.Popen(
                # The tests may run with signals ignored. `drumline run` leaves them ignored, torchrun does not.
                ["env", "--default-signal", *command, prefix + line.command, *map(filled, shlex.split(line.words))],
                cwd=folder, text=True,
                env=environment(told, temporary) | {name: filled(value) for name, value in line.environment.items()},
                stdin=subprocess.PIPE, stdout=out, stderr=err, start_new_session=True,
            ))  # fmt: skip
    try:
        if line.signal:
            wait_for(lambda: len([*told.glob("*, ready.json")]) == 2 or jobs[0].poll() is not None)
            jobs[0].send_signal(signal.Signals[line.signal])
        for job in jobs:
            job.communicate(line.stdin, timeout=LIMIT_S)
    finally:
        for job in jobs:
            job.kill()
            job.wait()
        left = left_behind(told)
    found: Outcome = {"exit code": [job.returncode for job in jobs], "left behind": left}
    for file in told.glob("*.json"):
        if not file.stem.endswith(", ready"):
            found |= flat(file.stem, json.loads(file.read_text()))
    replaced = {str(folder): "FOLDER", str(port): "PORT"}
    found = {key: plain(value, replaced) for key, value in found.items()}
    return found | shown(launcher, folder) | files(folder / "logs") | {"temporary files": any(temporary.iterdir())}


def fill(places: dict[str, object], text: str) -> str:
    return re.sub(r"(?<!\$)\{(\w+)\}", lambda found: str(places[found[1]]), text)


def environment(told: Path, temporary: Path) -> dict[str, str]:
    """That of this process, without an outer launcher's."""
    foreign = ("PET_", "TORCHELASTIC_", "DRUMLINE_", "PYTEST_", "MASTER_", "OMP_")
    here = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    # A restart after a pause is a restart. torchrun does not know this variable and takes no notice.
    return here | {
        "TOLD": str(told), "PYTHONPATH": str(TOLD.parent), "LC_ALL": "C.UTF-8", "PET_RESTART_DELAY": "0",
        "PYTHONDONTWRITEBYTECODE": "1", "TMPDIR": str(temporary),
    }  # fmt: skip


def wait_for(condition) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def left_behind(told: Path) -> int:
    """How many ranks are still there some seconds after their launcher. It ends them."""
    ranks = [int(file.read_text()) for file in told.glob("*, ready.json")]
    deadline = time.monotonic() + PATIENCE_S
    while (left := [rank for rank in ranks if Path(f"/proc/{rank}/exe").exists()]) and time.monotonic() < deadline:
        time.sleep(0.02)
    for rank in left:
        os.kill(rank, signal.SIGKILL)
    return len(left)


def flat(name: str, content: object) -> Outcome:
    """What a rank told, one fact each."""
    if not isinstance(content, dict):
        return {name: content}
    content = dict(content)
    name = name.removesuffix(", got")
    found = {f"{name}, variable {key}": value for key, value in content.pop("environment").items()}
    found |= {f"{name}, argument {at}": value for at, value in enumerate(content.pop("arguments"))}
    return found | {f"{name}, {key}": value for key, value in content.items()}


def plain(value: object, replaced: dict[str, str]) -> object:
    for text, name in replaced.items():
        value = value.replace(text, name) if isinstance(value, str) else value
    return value


def shown(launcher: str, folder: Path) -> Outcome:
    """Lines of ranks, without a number in brackets in front of them, and not those that a report quotes with spaces in
    front. Their order is that of processes."""
    found: Outcome = {}
    for stream in ("stdout", "stderr"):
        text = "".join(file.read_text() for file in sorted(folder.glob(f"{stream} *")))
        print(f"---- {stream} of {launcher}\n{text}")
        found[f"shown on {stream}"] = sorted(re.findall(RANKS_LINE, text, re.MULTILINE))
    return found


def files(logs: Path) -> Outcome:
    """What is below --log-dir. The launcher has drawn a part of the name of the folder of the job."""
    found: Outcome = {}
    for file in logs.rglob("*"):
        job, *rest = file.relative_to(logs).parts
        text = "a folder" if file.is_dir() else file.read_text()
        if file.suffix == ".json":
            text = error_of(json.loads(text))
        found["file " + "/".join(["JOB" if rest or file.is_dir() else job, *rest])] = text
    return found


def error_of(file: dict) -> object:
    """An error file, without the time and the addresses in the traceback."""
    message = file["message"]
    if "extraInfo" in message:
        *_, last = message["extraInfo"].pop("py_callstack").splitlines()
        message["extraInfo"] = [*message["extraInfo"], last]
    return file


def drawn_by_launcher(key: str, value: object, line: Line) -> object:
    """A name, port or folder that the launcher has drawn, in place of one that the line gives."""
    if key.endswith("variable TORCHELASTIC_RUN_ID") and "rdzv-id" not in line.words:
        return "random"
    if key.endswith("variable MASTER_PORT") and value != "PORT":
        return "free"
    if key.endswith("variable TORCHELASTIC_ERROR_FILE"):
        return "/".join(Path(str(value)).parts[-2:])
    if key.endswith("variable TORCHELASTIC_TIMER_FILE"):
        return "a pipe"
    return value


def differences(line: Line, torchrun: Outcome, drumline: Outcome) -> dict[str, tuple[object, object]]:
    found = {}
    for key in sorted(torchrun.keys() | drumline.keys()):
        both = tuple(drawn_by_launcher(key, it[key], line) if key in it else "(nothing)" for it in (torchrun, drumline))
        if both[0] != both[1]:
            found[key] = both
    return found


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def case(name: str, line: Line):
    return pytest.param(name, marks=[] if line.is_quick else [pytest.mark.slow])


@needs_torchrun
@pytest.mark.parametrize("name", [case(*item) for item in LINES.items()])
def test_a_line_means_what_it_means_to_torchrun(name: str, tmp_path: Path):
    line, port = LINES[name], free_port()
    both = [outcome(launcher, line, tmp_path / launcher, port) for launcher in LAUNCHERS]
    found = differences(line, *both)
    unsaid = {key: it for key, it in found.items() if not any(fits(key, said) for said in (*line.differs, *ALWAYS))}
    assert not unsaid, "torchrun, drumline: " + json.dumps(unsaid, indent=1)
    for said in line.differs:
        assert any(fits(key, said) for key in found), f"nothing differs any more as {said} says"


def fits(key: str, said: Differs) -> bool:
    return any(fnmatch.fnmatchcase(key, pattern) for pattern in said.what.split("|"))


def test_the_page_says_what_differs():
    page = " ".join(PAGE.read_text().split())
    said = {said.sentence for line in LINES.values() for said in line.differs} | {said.sentence for said in ALWAYS}
    assert not [sentence for sentence in said if sentence not in page]
    assert len(LINES) >= 40
