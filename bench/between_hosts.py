"""What is measured between two hosts on one machine: every collective by hosts, and torch on both backends."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from hosts import Hosts
from page import Figure, Goal, Ratio
from peers import HERE, Absent, json_lines
from sections import DRUMLINE, M, Section, Turn, bound_us, row_name, size_name, sizes_of

# Python with torch and this drumline: `make python-release`.
PYTHON = HERE.parent / "target/python-venv/bin/python"

ROOTED = ["broadcast", "reduce"]
LONG = ["all_reduce", "all_gather", "reduce_scatter", *ROOTED]
SHORT = [*LONG, "gather", "scatter", "all_to_all", "scan", "exclusive_scan", "barrier"]
BY_HOSTS, ALL_WITH_ALL = "by hosts", "all with all"
OUT_OF_PLACE = {"all_gather", "reduce_scatter", "gather", "scatter", "all_to_all"}


def place(operation: str) -> str:
    return "out" if operation in OUT_OF_PLACE else "in"


def short(operation: str) -> int:
    """8 bytes of every rank."""
    return 64 if operation in OUT_OF_PLACE else 8


def short_row(operation: str) -> str:
    return operation if operation == "barrier" else row_name(operation, short(operation), True)


def by_hosts() -> Section:
    """Each collective, where ranks of a host share memory and where they do not."""
    titles = {"shm": BY_HOSTS, "unix": ALL_WITH_ALL}

    def run(gigabits: int, row: str, operation: str, *what: str, count: int = 2) -> list[Figure]:
        arguments = [operation, "--transport", "shm,unix", "--rounds", "1", "-w", "2", *what]
        with Hosts(gigabits, count=count) as hosts:
            rows = hosts.drumline(DRUMLINE, 4, arguments, 150)
        figures = []
        for found in rows:
            title = titles[found["transport"].split("+")[0]]
            figures.append(Figure(row, title, found["p50_us"], found["cpu_s_per_gb"]))
            if title == BY_HOSTS and "--iters" in what:
                figures.append(Figure(row, "bound", bound_us(found)))
        return figures

    def long(gigabits: int, operation: str) -> list[Figure]:
        row = long_rows[operation] + (f", {gigabits} Gb/s" if gigabits > 1 else "")
        what = ["--place", place(operation), *sizes_of([64 * M]), "--iters", "3"]
        return run(gigabits, row, operation, *what)

    def rooted(operation: str) -> list[Figure]:
        what = ["--place", place(operation), *sizes_of([64 * M]), "--iters", "3"]
        return run(1, three_hosts(operation), operation, *what, count=3)

    def brief(operation: str) -> list[Figure]:
        what = ["--place", place(operation), *sizes_of([short(operation)])]
        return run(1, short_row(operation), operation, *(what if operation != "barrier" else []), "--time", "300ms")

    def turn(each: Callable[[str], list[Figure]], operations: list[str]) -> Turn:
        all_of_them = lambda: [figure for operation in operations for figure in each(operation)]
        return Turn((BY_HOSTS, ALL_WITH_ALL, "bound"), frozenset(), all_of_them)

    three_hosts = lambda operation: f"{long_rows[operation]}, 3 hosts"
    long_rows = {operation: row_name(operation, 64 * M, True) for operation in LONG}
    times = Ratio(f"{ALL_WITH_ALL} / {BY_HOSTS}", (ALL_WITH_ALL,), BY_HOSTS)
    bound = Ratio(f"bound / {BY_HOSTS}", ("bound",), BY_HOSTS)
    return Section(
        "by_hosts",
        "Collectives between two hosts with 4 ranks each, lines of 1 Gb/s unless it is said",
        f"`{BY_HOSTS}`: ranks of a host share memory. `{ALL_WITH_ALL}`: they do not. `bound` is a plain stream of the "
        "bytes that a host must send and receive. The size is that of the longest buffer of a rank.",
        (turn(partial(long, 1), LONG), turn(partial(long, 10), LONG), turn(brief, SHORT),
         turn(rooted, ROOTED)),
        (times, bound),
        (
            Goal(times, (long_rows["all_gather"], long_rows["reduce_scatter"]), 3.5),
            Goal(bound, tuple(long_rows.values()), 0.9),
            Goal(bound, tuple(f"{row}, 10 Gb/s" for row in long_rows.values()), 0.8),
            Goal(bound, tuple(map(three_hosts, ROOTED)), 0.85),
            Goal(times, tuple(map(short_row, SHORT)), 1.0),
            Goal(times, (short_row("broadcast"), "barrier"), 1.5),
        ),
        rounds_max=3,
        with_cpu=True,
    )


def torch_rows(hosts: Hosts, per_host: int, program: str, arguments: list[str], settings: dict[str, str]) -> list[dict]:
    """What rank 0 of a torch program prints, with `per_host` ranks on each host."""
    if not PYTHON.exists():
        raise Absent("there is no target/python-venv with drumline (make python-release)")
    command = [str(PYTHON), str(HERE / program), *arguments]
    settings = {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1", **settings}
    return json_lines(hosts.ranks(per_host, command, 200, settings)[0])


def through_torch() -> Section:
    """torch's collectives on drumline and on gloo, in the same namespaces."""
    worlds = [(2, 16 * M, ["all_reduce", "all_gather", "reduce_scatter"]),
              (4, 64 * M, [*LONG, "all_to_all"])]
    ours, theirs = "drumline", "gloo"
    row = lambda operation, size, per_host: f"{operation} {size_name(size)}, 2 x {per_host}"

    def turn(backend: str) -> Turn:
        def run() -> list[Figure]:
            figures = []
            for per_host, size, operations in worlds:
                cases = [f"{operation}:{size}" for operation in operations]
                with Hosts(1) as hosts:
                    rows = torch_rows(hosts, per_host, "torch_loop.py", [backend, "500", *cases], {})
                figures += [Figure(row(found["operation"], size, per_host), backend, found["median_us"])
                            for found in rows if "absent" not in found]
            return figures

        return Turn((backend,), frozenset({"gloo"}), run)

    ratio = Ratio("gloo / drumline", (theirs,), ours)
    rows = tuple(row(operation, size, per_host) for per_host, size, operations in worlds[1:] for operation in operations)
    return Section(
        "torch_hosts",
        "torch between two hosts, link of 1 Gb/s",
        "`2 x 4`: two hosts with 4 ranks each. The size is that of the longest buffer of a rank.",
        (turn(ours), turn(theirs)),
        (ratio,),
        (Goal(ratio, rows, 2.0),),
        rounds_max=3,
    )


def sharded() -> Section:
    """A step of FSDP2."""
    columns = {BY_HOSTS: {}, ALL_WITH_ALL: {"DRUMLINE_SHARED_MEMORY": "0"}}

    def turn(column: str) -> Turn:
        def run() -> list[Figure]:
            with Hosts(1) as hosts:
                (found,) = torch_rows(hosts, 4, "fsdp_step.py", [], columns[column])
            return [Figure("a step", column, found["median_us"])]

        return Turn((column,), frozenset({"gloo"}), run)

    ratio = Ratio(f"{ALL_WITH_ALL} / {BY_HOSTS}", (ALL_WITH_ALL,), BY_HOSTS)
    return Section(
        "sharded",
        "FSDP2 of a small GPT in torch, two hosts with 4 ranks each, link of 1 Gb/s",
        "",
        tuple(map(turn, columns)),
        (ratio,),
        (Goal(ratio, ("a step",), 2.0),),
        rounds_max=3,
    )


SECTIONS = [by_hosts, through_torch, sharded]
