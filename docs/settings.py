"""Makes docs/reference/settings.md of the code: python3 docs/settings.py

With --check it writes nothing, and fails if the page is not what the code says, or if the code reads a
variable that the page lacks. `make links` does that.
"""

from __future__ import annotations

import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs/reference/settings.md"
CONFIG = ROOT / "crates/drumline-group/src/config.rs"
BUILDER = ROOT / "crates/drumline-group/src/config/builder.rs"
IN_PYTHON = ROOT / "crates/drumline-python/src/config.rs"
LAUNCHER = ROOT / "crates/drumline-cli/src/cli"

# Variables that are no fields of Config: who reads them, and what they do.
OTHERS = {
    "DRUMLINE_SECRET_FILE": ("`secret`", "A file with the secret, mode 600. Set this or `DRUMLINE_SECRET`, not both."),
    "DRUMLINE_TRACE_BYTES_MAX": ("`trace`", "The most bytes that one rank's trace may take; 256 MiB unless set."),
    "GLOO_SOCKET_IFNAME": ("`socket_ifname`", "Read where `DRUMLINE_SOCKET_IFNAME` is not set. Names are exact. On several hosts `drumline run` sets it for torch's gloo, unless it is set already."),
    "DRUMLINE_STORE": ("`env://`", "Where the ranks meet: `unix:@name` or `tcp://host:port`. `drumline run` sets it."),
    "DRUMLINE_LAUNCHER": ("set by the launcher", "Where `step` reaches the launcher of this host."),
    "DRUMLINE_GIVEN": (
        "set by the launcher",
        "What else the launcher has set and a user might set. It does not count in a job that a rank starts.",
    ),
    "DRUMLINE_LEASE": ("set by the launcher", "On several hosts: the descriptor of a timer. A rank ends when it has run out."),
    "DRUMLINE_STEPS": ("set by the launcher", "`step` tells the launcher which step a rank begins."),
    "TORCH_DISTRIBUTED_DEBUG": ("`debug`", "Read where `DRUMLINE_DEBUG` is not set: `OFF`, `INFO`, `DETAIL`."),
    "RANK": ("`env://`", "The number of this rank. Every launcher sets it."),
    "WORLD_SIZE": ("`env://`", "How many ranks there are. Every launcher sets it."),
    "MASTER_ADDR": ("`env://`", "The host of the store, where `DRUMLINE_STORE` is not set."),
    "MASTER_PORT": ("`env://`", "The port of the store, where `DRUMLINE_STORE` is not set."),
    "TORCHELASTIC_USE_AGENT_STORE": ("`env://`", "`True`: the launcher hosts the store. `drumline run` and torchrun set it."),
    "TORCHELASTIC_RUN_ID": ("`is_torchelastic_launched`", "Says that torchrun, or `drumline run`, started the process."),
    "TORCHELASTIC_RESTART_COUNT": ("start-up", "Which start of the job this is. `drumline run` and torchrun set it."),
    "LOCAL_RANK": ("binding to memory nodes, HaiScale", "The number of this rank on its host."),
    "LOCAL_WORLD_SIZE": ("binding to memory nodes", "How many ranks there are on this host."),
    "GROUP_RANK": ("`drumline bench`", "The number of the host, for plain streams between hosts."),
    "DRUMLINE_REPLACE_GLOO": ("Python, at `import torch`", "1: `gloo` means drumline. 0 unless set."),
    "DRUMLINE_TORCH_BASE": (
        "Python, when torch makes a group",
        "What drumline is for torch: `backend`, or `process-group`, as for torch before 2.14. For tests. `backend` unless set, where torch can.",
    ),
    "PET_*": ("`drumline run`", "The default of a flag, as under torchrun: `PET_RDZV_ID` of `--rdzv-id`."),
    "PYTHON_EXEC": ("launcher", "The interpreter of scripts; else `python3` beside `drumline`, else that of `PATH`."),
    "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": ("launcher", "`--shutdown-timeout`, where that is not given, nor by `PET_`."),
    "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": ("launcher", "`--log-line-prefix-template`, in the same way."),
    "DRUMLINE_SPAWN": ("set by `spawn`", "Tells a process that it is a rank, and of which call."),
    "TORCHELASTIC_ERROR_FILE": ("launcher, `record`", "The file in which a process says why it failed. The launcher sets it for each rank."),
    "TORCHELASTIC_ENABLE_FILE_TIMER": ("launcher", "1: it ends processes whose timers of torch expire."),
    "TORCHELASTIC_TIMER_FILE": ("launcher, and set by it", "The named pipe for these timers."),
    "TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT": ("launcher", "Has no effect: `--step-timeout` ends a rank that hangs."),
    "TORCHELASTIC_HEALTH_CHECK_PORT": ("launcher", "`--health-port`, where that is not given, nor by `PET_`."),
    "NOTIFY_SOCKET": ("launcher", "The service manager (systemd) that hears how the job is. Ranks do not get it."),
    "WATCHDOG_USEC": ("launcher", "The service manager wants to hear so often that the launcher lives."),
    "WATCHDOG_PID": ("launcher", "The process that is meant by `WATCHDOG_USEC`."),
    "CUDA_VISIBLE_DEVICES": ("launcher", "Which GPUs `--nproc-per-node gpu` and `auto` count."),
    "HIP_VISIBLE_DEVICES": ("launcher", "The same for GPUs of AMD; it beats `CUDA_VISIBLE_DEVICES`."),
    "ROCR_VISIBLE_DEVICES": ("launcher", "The same; `HIP_VISIBLE_DEVICES` counts among those that it shows."),
    "SLURM_NODEID": ("launcher", "`--node-rank`, in a step with one task on each of several hosts."),
    "SLURM_STEP_NUM_NODES": ("launcher", "How many hosts the step has."),
    "SLURM_STEP_NUM_TASKS": ("launcher", "How many tasks the step has."),
    "OMPI_COMM_WORLD_*": ("`drumline env`", "What Open MPI's launcher says about a rank."),
    "PMIX_NAMESPACE": ("`drumline env`", "The name of a job of Open MPI."),
    "PMI_*": ("`drumline env`", "What servers of PMI-1 say: `PMI_RANK`, `PMI_SIZE`, `PMI_FD`."),
    "MPI_LOCALRANKID": ("`drumline env`", "The number of a rank on its host, of MPICH and Intel MPI."),
    "MPI_LOCALNRANKS": ("`drumline env`", "How many ranks a host has, of MPICH and Intel MPI."),
    "SLURM_STEP_ID": ("`drumline env`", "Says that a process is a task of a step; `SLURM_PROCID`, `SLURM_LOCALID` and `SLURM_STEP_*` say which one."),
    "JOB_COMPLETION_INDEX": ("launcher", "`--node-rank` in an indexed job of Kubernetes."),
    "DRUMLINE_ETCD_USER": ("stores in etcd", "The user, for an etcd that asks for one."),
    "DRUMLINE_ETCD_PASSWORD": ("stores in etcd", "The password of that user."),
    "DRUMLINE_DISABLE_RSEQ": ("launcher", "As the flag `--disable-rseq`; 0 or 1."),
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": ("set by the launcher", "1, as torchrun sets it, unless it is set already."),
    "DRUMLINE_TERMINAL_COLUMNS": ("set by the launcher", "How wide the launcher's terminal is: a rank may draw progress."),
    "DRUMLINE_NUMA_BINDING": ("set by the launcher", "The rank binds itself to a memory node before it starts the program."),
    "OMP_NUM_THREADS": ("launcher", "Several ranks get 1 unless it is set, as under torchrun."),
    "GLIBC_TUNABLES": ("launcher", "`--disable-rseq` adds `glibc.pthread.rseq=0`."),
    "PATH": ("launcher", "Where programs are looked up."),
    "PYTHONPATH": ("HaiScale", "What stands for HaiScale's modules is added, so that child processes find them."),
    "RUST_LOG": ("Python; Rust programs with a subscriber of `tracing`; the launcher", "`drumline=info` shows what is chosen at start-up; warnings unless set."),
    "NO_COLOR": ("launcher", "Not empty: no colours."),
    "TERM": ("launcher", "`dumb`: no progress lines that are drawn again."),
}

# Of tests and of the example programs alone.
TESTS = {
    "DRUMLINE_TEST_HOSTS": "Tests of several hosts that cannot run fail; they say so and pass unless set.",
    "DRUMLINE_TEST_ETCD": "Tests of stores in etcd fail without etcd; they say so and pass unless set.",
    "DRUMLINE_TEST_MPI": "Prefixes of MPIs, with colons between them, whose launchers are tried.",
    "DRUMLINE_TEST_PYTHON": "The interpreter with torch for tests of stores.",
    "DRUMLINE_PROGRAM": "The number of one random program of the conformance suite.",
    "DRUMLINE_PART": "The part of the conformance suite to run: 3/24.",
    "DRUMLINE_SOAK": "1: the long form of Python's tests.",
    "DRUMLINE_SLOW_TESTS": "1: tests that take minutes run, too.",
}

# A test tells its own processes by these; nobody else sets them. CALL, STEPS and so on are of examples.
INNER = re.compile(r"DRUMLINE_TEST_(ALONE|MEET|URL|FILE|TASK|MARKER|DEVICE_WORLDS|EACH_CALL_STEP|MPI_(ROLE|RANK|LIBRARY|DEATH|NOTES|CASE))$")

# Programs that test others, with variables of their own.
NOT_THE_LIBRARY = {"target", "drumline-fuzz", "drumline-faults", "drumline-standin"}

# How Rust and Python read a variable, or name one to read it later.
READS = re.compile(
    r"(?:env::var(?:_os)?|from_env|variable|parsed|bytes|read|environ(?:\.get|\.pop)?|getenv)[(\[]\s*\"([A-Z][A-Z0-9_]+)\""
    r"|const [A-Z_]+: &str = \"((?:DRUMLINE|GLOO|MASTER|TORCH|TORCHELASTIC)_[A-Z0-9_]+)\""
    r"|\benv = \"([A-Z][A-Z0-9_]+)\""
    r"|\"(DRUMLINE_[A-Z0-9_]+)\""
)


def read_by_code() -> dict[str, str]:
    """Every variable that the library, its tools and its tests read, with the first file that does."""
    found: dict[str, str] = {}
    for folder, ending in (("crates", "rs"), ("examples", "rs"), ("python", "py"), ("examples", "py")):
        for path in sorted((ROOT / folder).rglob(f"*.{ending}")):
            if NOT_THE_LIBRARY & set(path.parts):
                continue
            text = re.sub(r"^\s*(///|//!|//|#).*$", "", path.read_text(), flags=re.MULTILINE)
            of_library = "tests" not in path.parts and "examples" not in path.parts
            if of_library and path.suffix == ".rs":
                text = text.split("#[cfg(test)]\nmod ")[0]
            for match in READS.finditer(text):
                name = next(filter(None, match.groups()))
                if of_library or name.startswith("DRUMLINE_"):
                    found.setdefault(name, str(path.relative_to(ROOT)))
    return {name: path for name, path in found.items() if not INNER.match(name)}


def fields() -> list[tuple[str, str, str]]:
    """Name, variables and description of every field of Config, in their order."""
    body = CONFIG.read_text().split("pub struct Config {")[1].split("\n}")[0]
    result = []
    for comment, name in re.findall(r"((?:^ *///.*\n)+) *pub (\w+):", body, re.MULTILINE):
        text = " ".join(line.strip().removeprefix("///").strip() for line in comment.splitlines())
        text = re.sub(r" \[`\w+`\]: \S+$", "", text.strip())
        text = re.sub(r"\[(`[^`]+`)\](\([^)]*\))?", r"\1", text)
        text = text.replace("crate::", "").replace("|", "\\|")
        own = next(iter(re.findall(r"`(DRUMLINE_\w+)`", text)), None)
        if own is None:
            raise SystemExit(f"{CONFIG.name}: the comment of `{name}` names no variable")
        result.append((name, own, text))
    return result


def in_python() -> set[str]:
    arms = IN_PYTHON.read_text().split("match name.as_str() {")[1].split("_ =>")[0]
    return set(re.findall(r'^\s+"(\w+)" =>', arms, re.MULTILINE))


def flags() -> list[tuple[str, str, str]]:
    """Flag, default and description of every option of `drumline run`."""
    body = "".join(path.read_text() for path in sorted(LAUNCHER.glob("*.rs")))
    structs = re.findall(r"struct (?:(?!Launch|Env)\w+Args|Rseq) \{(.*?)\n\}", body, re.DOTALL)
    result = []
    for comment, attribute, name in re.findall(
        r"((?:^ *///.*\n)+) *#\[arg\(((?:.|\n)*?)\)\]\n *(?:pub\((?:crate|super)\) )?(\w+):", "\n".join(structs), re.MULTILINE
    ):
        if not re.search(r"\blong\b", attribute):
            continue
        text = " ".join(line.strip().removeprefix("///").strip() for line in comment.splitlines())
        value = re.search(r'value_name = "(.+?)"', attribute)
        default = re.search(r'\bdefault_value(?:_t)? = (?:"([^"]+)"|(\d+))', attribute)
        named = re.search(r'\blong = "([\w-]+)"', attribute)
        flag = "--" + (named[1] if named else name.replace("_", "-"))
        shown = f"{flag} {value[1]}" if value else flag
        result.append((shown.replace("|", "\\|"), default[1] or default[2] if default else "", text.replace("|", "\\|")))
    return sorted(result)


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    return ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)] + ["| " + " | ".join(row) + " |" for row in rows] + [""]


def page() -> str:
    arguments = in_python()
    of_config = fields()
    lines = [
        "# Settings",
        "",
        "<!-- Made by docs/settings.py of the code. Change the comments there, and run `make settings`. -->",
        "",
        "A setting is a variable of the environment, a method of `Config` in Rust, and mostly an argument of",
        "`drumline.init_process_group` in Python. An argument wins over the variable. `drumline run` and torchrun",
        "pass the variables on to their ranks. A value that cannot be understood is an error that names the variable.",
        "In Rust `Config` also comes from a file, by serde: `timeout_s` there is `DRUMLINE_TIMEOUT_S` here, and so on.",
        "Secrets stay out of it.",
        "",
        "## Of a group",
        "",
    ]
    rows = []
    for name, variable, text in of_config:
        heard = f"`{name}=`" if name in arguments else "the variable"
        rows.append([f"`{variable}`", f"`Config::{name}`", heard, text])
    lines += table(["variable", "Rust", "Python", "meaning"], rows)
    lines += ["## Others", ""]
    rows = [[f"`{name}`", who, text] for name, (who, text) in OTHERS.items()]
    lines += table(["variable", "heard by", "meaning"], rows)
    lines += ["## Flags of `drumline run`", "", "[All commands and their flags](command-line.md).", ""]
    lines += table(["flag", "unless given", "meaning"], [[f"`{flag}`", f"`{default}`" if default else "", text] for flag, default, text in flags()])
    lines += ["## Of tests", ""]
    lines += table(["variable", "meaning"], [[f"`{name}`", text] for name, text in TESTS.items()])
    return "\n".join(lines)


def problems() -> list[str]:
    listed = {variable for _, variable, _ in fields()} | OTHERS.keys() | TESTS.keys()
    read = read_by_code()
    found = [f"{path} reads {name}, which docs/settings.py lacks" for name, path in read.items() if name not in listed]
    ours = {name for name in listed if name.startswith("DRUMLINE_")}
    found += [f"docs/settings.py has {name}, which no code reads" for name in sorted(ours - read.keys())]
    unknown = in_python() - {name for name, _, _ in fields()}
    found += [f"{IN_PYTHON.name} takes {name}, which is no field of Config" for name in sorted(unknown)]
    return found


def main() -> int:
    if "--check" not in sys.argv:
        PAGE.write_text(page())
    found = problems()
    if not PAGE.exists() or PAGE.read_text() != page():
        found.append("docs/reference/settings.md is not what the code says: make settings")
    print("\n".join(found), file=sys.stderr, end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
