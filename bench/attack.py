"""Whether strangers delay a job: its time alone, and its time while another user attacks the door of its store.

    python3 bench/attack.py target/release/drumline [--rounds 5] [--connections 10000]

Runs as root, because the attacker is another user. The two jobs are those of the two doors: `drumline run` with
the store for torch's programs, which asks for no secret, and ranks that meet at a TCP store behind a secret.
Each round runs a job alone, and then attacked. The attacker has the lowest priority: its own work on the same
cores should not count.
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
        times = {"alone": [], "attacked": []}
        made = []
        for _ in range(options.rounds):
            for attacked, kept in times.items():
                port = free_port()
                with attacker(port, options.connections if attacked == "attacked" else 0) as attack:
                    start = time.monotonic()
                    run(options.drumline, port)
                    kept.append(time.monotonic() - start)
                    attack.terminate()
                    made.append(int(attack.stdout.read() or 0))
        alone, attacked = (statistics.median(times[kind]) for kind in ("alone", "attacked"))
        print(
            f"{door} door: alone {alone:.2f} s ({spread(times['alone'])}), attacked {attacked:.2f} s "
            f"({spread(times['attacked'])}), {attacked / alone:.2f} times; {max(made)} connections in a job at most"
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


def attacker(port, connections):
    command = [sys.executable, __file__, "--attack", str(port), str(connections)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def attack(port, connections):
    """Keeps this number of connections open, a quarter of each kind, until it is ended. Prints how many it made."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    os.nice(19)
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    over = []
    signal.signal(signal.SIGTERM, lambda *_: over.append(True))
    big, kept, made = bytes(7 << 20), [], 0
    for number in itertools.count():
        if over:
            break
        if connections == 0:
            time.sleep(0.05)
            continue
        stream = socket.socket()
        stream.settimeout(0.2)
        try:
            stream.connect(("127.0.0.1", port))
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


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def spread(times):
    return f"{min(times):.2f}..{max(times):.2f}"


if __name__ == "__main__":
    if sys.argv[1:2] == ["--attack"]:
        attack(*map(int, sys.argv[2:]))
    else:
        main()
