"""Whether strangers delay a job: its time alone, and its time while another user attacks the door of its store.

    python3 bench/attack.py target/release/drumline [--rounds 5] [--connections 10000]

Runs as root, because the attacker is another user. The two jobs are those of the two doors: `drumline run` with
the store for torch's programs, which asks for no secret, and ranks that meet at a TCP store behind a secret.
Each round runs a job alone, a job beside an attack on a server of the attacker, and a job that is attacked. The
attacker takes time of the same cores, although it has the lowest priority. So the second time shows what any
program on this machine would lose, and the third what the doors add.
"""

import argparse
import itertools
import os
import resource
import signal
import socket
import statistics
import subprocess
import sys
import time

NOBODY = 65534
WORK = ["bench", "all_reduce", "--sizes", "1M", "--place", "in", "--rounds", "5", "--iters", "3000"]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("drumline")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--connections", type=int, default=10_000)
    options = parser.parse_args()
    for door, run in [("open", run_with_open_door), ("secured", run_with_secured_door)]:
        times = {"alone": [], "elsewhere": [], "attacked": []}
        made = []
        for _ in range(options.rounds):
            for kind, kept in times.items():
                port = free_port()
                goal = {"alone": "nothing", "elsewhere": "itself", "attacked": str(port)}[kind]
                with attacker(goal, options.connections) as attack:
                    start = time.monotonic()
                    run(options.drumline, port)
                    kept.append(time.monotonic() - start)
                    attack.terminate()
                    made.append(int(attack.stdout.read() or 0))
        medians = {kind: statistics.median(kept) for kind, kept in times.items()}
        told = ", ".join(f"{kind} {medians[kind]:.2f} s ({spread(kept)})" for kind, kept in times.items())
        print(
            f"{door} door: {told}; attacked / alone {medians['attacked'] / medians['alone']:.2f}, attacked / elsewhere "
            f"{medians['attacked'] / medians['elsewhere']:.2f}; {max(made)} connections in a job at most"
        )


def run_with_open_door(drumline, port):
    job = [drumline, "run", "--nproc-per-node", "2", "--master-port", str(port), "--", drumline, *WORK]
    subprocess.run(job, check=True, stdout=subprocess.DEVNULL)


def run_with_secured_door(drumline, port):
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    shared |= {"LOCAL_WORLD_SIZE": "2", "DRUMLINE_SECRET": "a secret that the attacker does not know"}
    ranks = []
    for rank in ("0", "1"):
        place = os.environ | shared | {"RANK": rank, "LOCAL_RANK": rank}
        ranks.append(subprocess.Popen([drumline, *WORK], env=place, stdout=subprocess.DEVNULL))
    for rank in ranks:
        if rank.wait() != 0:
            sys.exit("a rank has failed")


def attacker(goal, connections):
    """`goal` is a port, or `nothing`, or `itself`: a server of the attacker that closes what it accepts."""
    command = [sys.executable, __file__, "--attack", goal, str(connections)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def attack(goal, connections):
    """Keeps this number of connections open, a quarter of each kind, until it is ended. Prints how many it made."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    os.nice(19)
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    if goal == "itself":
        goal = serve()
    over = []
    signal.signal(signal.SIGTERM, lambda *_: over.append(True))
    big, kept, made = bytes(7 << 20), [], 0
    for number in itertools.count():
        if over:
            break
        if goal == "nothing":
            time.sleep(0.05)
            continue
        stream = socket.socket()
        stream.settimeout(0.2)
        try:
            stream.connect(("127.0.0.1", int(goal)))
            made += 1
            stream.setblocking(False)
            # Nothing; one byte; garbage; much.
            stream.send([b"", b"\0", b"GET / HTTP/1.1\r\n\x1b[2J\r\n", big][number % 4])
        except OSError:
            time.sleep(0.001)
        kept.append(stream)
        if len(kept) > connections:
            kept.pop(0).close()
        if number % 50 == 0:
            for stream in kept[-500:]:
                try:
                    stream.send(big[: 64 << 10])
                except OSError:
                    pass
    print(made)


def serve():
    """Accepts and closes connections in a child, which ends with this process. Returns the port."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
    parent = os.getpid()
    if os.fork() == 0:
        listener.settimeout(1)
        while os.getppid() == parent:
            try:
                listener.accept()[0].close()
            except OSError:
                pass
        os._exit(0)
    return listener.getsockname()[1]


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def spread(times):
    return f"{min(times):.2f}..{max(times):.2f}"


if __name__ == "__main__":
    if sys.argv[1:2] == ["--attack"]:
        attack(sys.argv[2], int(sys.argv[3]))
    else:
        main()
