"""Command lines that torchrun and `drumline run` both take, and in what they may differ: the table of
test_command_lines.py."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Differs:
    """What may differ between the two outcomes, and the sentence of docs/reference/launcher.md that says so."""

    # Patterns of facts, between bars.
    what: str
    sentence: str


CODE = Differs("exit code", "The exit code is that of the first rank that failed, or 128 + n after signal n. torchrun's is 1.")
REFUSED = Differs("exit code", "What torchrun refuses with a traceback and exit code 1 is refused here with exit code 2.")
NO_SCRIPT = Differs("*", "If there is no script of that name, no rank starts, and the exit code is 127.")
NO_RESTART = Differs("*", "Exit codes 2, 126 and 127 are not followed by a restart")
MACROS = Differs("*, argument *", "torchrun also replaces `$local_rank`, and `$$` by `$`; here they stay")
GOES_ON = Differs("*", "Other signals that you name are passed on, and the job goes on; torchrun ends it.")
STDIN = Differs("*, stdin", "Its stdin is empty; under torchrun all ranks share that of the launcher.")
HOSTS_STORE = Differs("*, variable MASTER_*", "Each host offers torch's store to its ranks at a free port of 127.0.0.1")
PREFIX = Differs("file */filtered_*", "torchrun's is `[${role_name}${local_rank}]:`.")
NO_FILE = Differs("file JOB/attempt_0/0", "Without files there is no directory; torchrun always makes one and leaves it.")
NO_SUCH_RANK = Differs("*", "A local rank that does not exist is refused")
NO_NAME = Differs("*", "A signal that you do not name keeps its meaning; it kills torchrun, whose ranks then go on")
KILLED = Differs("left behind", "SIGKILL to the launcher ends the ranks and all that they have started; torchrun's go on")
RUN_PATH = Differs("*, path|*, group leader", "torchrun runs it in processes of its own interpreter.")
NAME = Differs("*, variable TORCHELASTIC_RUN_ID", "torchrun draws one on one host without an endpoint, whatever you give")
PORT = Differs("*, variable MASTER_PORT", "On one host its port is that of the store for programs that run torch; torchrun takes it for `static` only")

# What differs on every line.
ALWAYS = [
    Differs("temporary files", "Without files there is no directory; torchrun always makes one and leaves it."),
    Differs("*, variable DRUMLINE_*", "Workers also get variables of Drumline, whose names begin with `DRUMLINE_`."),
    Differs("*, variable MASTER_ADDR", "One host gives its ranks 127.0.0.1"),
    Differs("*, session leader", "A worker leads a process group, and under torchrun a session."),
    Differs("*, descriptors", "A worker may open as many descriptors as the hard limit allows."),
]

TWO = "--nproc-per-node 2"
# Several hosts need one. torchrun knows no such variable.
SECRET = {"DRUMLINE_SECRET": "that of test_command_lines.py"}


@dataclass(frozen=True)
class Line:
    """A command line behind `torchrun` and `drumline run`. `{told}` is the script of all ranks, `{host}` the number of a
    host. All hosts are this one."""

    words: str
    environment: dict[str, str] = field(default_factory=dict)
    # `launch`: behind `python -m torch.distributed.launch` and `drumline launch`.
    command: str = "run"
    # Sent to the launcher once both ranks are ready.
    signal: str | None = None
    stdin: str = ""
    hosts: int = 1
    # Also among the tests that always run.
    is_quick: bool = False
    differs: tuple[Differs, ...] = ()


LINES = {
    # ---- environment, arguments, program
    "two ranks": Line(f"{TWO} {{told}} --epochs 3 '' 'a b'", is_quick=True),
    "the other spelling": Line("--nproc_per_node=2 --nnodes=1:1 --max_restarts=2 {told} --nproc_per_node=3"),
    "a flag cut short": Line(f"--standa --ro trainer {TWO} {{told}}"),
    "the last of two flags counts": Line("--nproc-per-node 4 --nproc-per-node 2 {told}"),
    "one rank": Line("{told}"),
    "threads of OpenMP": Line(f"{TWO} {{told}}", {"OMP_NUM_THREADS": "3"}),
    "variables": Line(
        "{told}", {"PET_NPROC_PER_NODE": "2", "PET_ROLE": "trainer", "PET_MAX_RESTARTS": "1"}, is_quick=True
    ),
    "a variable for a flag without value": Line("{told}", {"PET_STANDALONE": "1", "PET_NPROC_PER_NODE": "2"}),
    "a flag beats its variable": Line(f"{TWO} {{told}}", {"PET_NPROC_PER_NODE": "3"}),
    "as many ranks as cores": Line("--nproc-per-node cpu {told}"),
    "as many ranks as there are devices": Line("--nproc-per-node auto {told}"),
    "standalone": Line("--standalone --nnodes 1 --nproc-per-node 2 {told}"),
    "named": Line(f"--rdzv-id job-7 --role trainer {TWO} {{told}}", differs=(NAME,)),
    "at a port": Line(f"--master-addr 127.0.0.1 --master-port {{port}} --node-rank 0 {TWO} {{told}}"),
    "static": Line(f"--rdzv-backend static --rdzv-endpoint 127.0.0.1:{{port}} --node-rank 0 {TWO} {{told}}"),
    "over c10d": Line(
        f"--rdzv-backend c10d --rdzv-endpoint 127.0.0.1:{{port}} --rdzv-id 7 --rdzv-conf join_timeout=60,is_host=1 "
        f"--local-addr 127.0.0.1 {TWO} {{told}}",
        differs=(PORT,),
    ),
    "a virtual local rank": Line(f"--virtual-local-rank {TWO} {{told}}", {"CUDA_VISIBLE_DEVICES": "4,7"}),
    "a module": Line(f"{TWO} -m told --module", is_quick=True),
    "a program": Line(f"{TWO} --no-python {{python}} {{told}} x"),
    "a path": Line(f"--run-path {TWO} {{told}} x", differs=(RUN_PATH,)),
    "another interpreter": Line(f"{TWO} {{told}}", {"PYTHON_EXEC": "{python}"}),
    "the local rank in arguments": Line(f"{TWO} {{told}} '--device=cuda:${{local_rank}}' '${{rank}}'"),
    "dollars in arguments": Line(f"{TWO} {{told}} '$local_rank' 'a$$b'", differs=(MACROS,)),
    "without effect": Line(
        f"--monitor-interval 0.05 --start-method fork --event-log-handler null --logs-specs default {TWO} {{told}}"
    ),
    "input": Line("{told} do=read", stdin="typed\n", differs=(STDIN,)),
    # ---- two hosts. They are two launchers here, since only what they read is compared: test_several_hosts.py has networks.
    "static, two hosts": Line(
        f"--nnodes 2 --node-rank {{host}} --master-addr 127.0.0.1 --master-port {{port}} {TWO} {{told}}",
        SECRET, hosts=2, differs=(HOSTS_STORE,),
    ),
    "c10d, two hosts": Line(
        "--nnodes 2 --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:{port} --rdzv-id 7 {told}", SECRET, hosts=2
    ),
    # ---- torch.distributed.launch, as tutorials call it
    "launch": Line("--nnodes 1 --nproc_per_node 2 {told}", command="launch", is_quick=True),
    "launch, arguments like flags": Line(
        "--nproc_per_node=2 --nnodes=1 --node_rank=0 {told} --lr 0.2 --layers 34 -m 7", command="launch"
    ),
    "launch, eight ranks at a port": Line(
        "--nproc_per_node=8 --nnodes=1 --node_rank=0 --master_addr 127.0.0.1 --master_port {port} {told}",
        {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"}, command="launch",
    ),
    "launch, only the environment": Line("--use-env --nproc_per_node=2 {told} x", command="launch"),
    # ---- failures
    "all fail": Line(f"{TWO} {{told}} do=leave:1"),
    "one fails": Line(f"{TWO} {{told}} do=leave:3@1 do=wait", differs=(CODE,), is_quick=True),
    "one fails, the other ignores SIGTERM": Line(
        f"--shutdown-timeout 1 {TWO} {{told}} do=leave:3@1 do=ignore", differs=(CODE,)
    ),
    "one is killed": Line(f"{TWO} {{told}} do=leave:SIGKILL@0 do=wait", differs=(CODE,)),
    "one dumps core": Line(f"{TWO} {{told}} do=leave:SIGSEGV@0 do=wait", differs=(CODE,)),
    "an uncaught error": Line(f"{TWO} {{told}} do=record"),
    "no such script": Line(f"{TWO} /no/such/script.py", differs=(NO_SCRIPT,)),
    "no such flag": Line(f"--no-such-flag {TWO} {{told}}"),
    "no program": Line(TWO, is_quick=True),
    "no number": Line("--nproc-per-node many {told}", differs=(REFUSED,)),
    "no GPU": Line("--nproc-per-node gpu {told}", differs=(REFUSED,)),
    "a module without Python": Line(f"-m --no-python {TWO} told", differs=(REFUSED,)),
    # ---- output
    "files": Line(f"--log-dir {{folder}}/logs --redirects 3 {TWO} {{told}}", is_quick=True),
    "files, and a restart": Line(
        f"--log_dir={{folder}}/logs -r 3 --max-restarts 1 {TWO} {{told}} do=leave:1@1! do=wait@0!"
    ),
    "files of some ranks": Line(f"--log-dir {{folder}}/logs -r 0:1,1:2 {TWO} {{told}}"),
    "files that are shown, too": Line(f"--log-dir {{folder}}/logs -t 3 {TWO} {{told}}"),
    "files of one rank that are shown, too": Line(f"--log-dir {{folder}}/logs -r 3 -t 1:1 {TWO} {{told}}"),
    "some ranks are shown": Line(f"--log-dir {{folder}}/logs -t 3 --local-ranks-filter 1 {TWO} {{told}}"),
    "what stands in front": Line(
        f"--log-dir {{folder}}/logs -t 3 --log-line-prefix-template '<${{role_name}} ${{local_rank}} ${{rank}}> ' "
        f"{TWO} {{told}}"
    ),
    "what stands in front, from a variable": Line(
        f"--log-dir {{folder}}/logs -t 3 --role a {TWO} {{told}}",
        {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "<${role_name} ${rank}> "},
    ),
    "lines with a word": Line(
        f"--log-dir {{folder}}/logs -t 3 --duplicate-stdout-filters 'out 1,t 0' --duplicate-stderr-filters 'rr 1' "
        f"{TWO} {{told}}",
        differs=(PREFIX,),
    ),
    "an error file": Line(f"--log-dir {{folder}}/logs {TWO} {{told}} do=record@1 do=wait", differs=(NO_FILE,)),
    "the error file of the launcher": Line(
        f"--log-dir {{folder}}/logs {TWO} {{told}} do=record@1 do=wait",
        {"TORCHELASTIC_ERROR_FILE": "{folder}/logs/first.json"},
        differs=(NO_FILE,),
    ),
    "no rank of that number": Line(f"-r 0:3,2:1 {TWO} {{told}}", differs=(NO_SUCH_RANK,)),
    "timers": Line(f"{TWO} {{told}}", {"TORCHELASTIC_ENABLE_FILE_TIMER": "1"}),
    # ---- restarts
    "a restart": Line(f"--max-restarts 2 {TWO} {{told}} do=leave:1@1! do=wait@0!", is_quick=True),
    "restarts are used up": Line(f"--max-restarts 1 {TWO} {{told}} do=leave:1@1 do=wait"),
    "restarts from a variable": Line(f"{TWO} {{told}} do=leave:SIGKILL!", {"PET_MAX_RESTARTS": "1"}),
    "no restart for a wrong command line": Line(
        f"--max-restarts 2 {TWO} {{told}} do=leave:2", differs=(CODE, NO_RESTART)
    ),
    # ---- signals
    "SIGTERM": Line(f"{TWO} {{told}} do=wait", signal="SIGTERM", differs=(CODE,), is_quick=True),
    "SIGINT": Line(f"{TWO} {{told}} do=wait", signal="SIGINT", differs=(CODE,)),
    "SIGHUP": Line(f"{TWO} {{told}} do=wait", signal="SIGHUP", differs=(CODE,)),
    "SIGQUIT": Line(f"{TWO} {{told}} do=wait", signal="SIGQUIT", differs=(CODE,)),
    "SIGTERM with restarts left": Line(f"--max-restarts 2 {TWO} {{told}} do=wait", signal="SIGTERM", differs=(CODE,)),
    "a signal that ranks ignore": Line(
        f"--shutdown-timeout 1 {TWO} {{told}} do=ignore", signal="SIGTERM", differs=(CODE,)
    ),
    "the time from the variable": Line(
        f"{TWO} {{told}} do=ignore", {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "1"}, signal="SIGTERM", differs=(CODE,)
    ),
    "a signal by name": Line(
        f"--signals-to-handle SIGTERM,SIGUSR1 {TWO} {{told}} do=wait", signal="SIGUSR1", differs=(GOES_ON,)
    ),
    "a signal without name": Line(
        f"--signals-to-handle SIGTERM,SIGINT {TWO} {{told}} do=wait", signal="SIGHUP", differs=(NO_NAME,)
    ),
    "SIGKILL": Line(f"{TWO} {{told}} do=wait", signal="SIGKILL", differs=(KILLED,)),
}
