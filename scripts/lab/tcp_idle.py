#!/usr/bin/env python3
"""What TCP costs an exchange after a pause, in which a connection forgets how much it may send at once.

    .venv/bin/python scripts/lab/tcp_idle.py --delay 25ms --rate 1gbit

Hosts of scripts/lab/netlab.sh, which needs root, exchange --bytes with each other one, on sockets of their own, after
pauses. Prints the median seconds until the slowest host has received everything, by congestion control: without a
pause; after it, with net.ipv4.tcp_slow_start_after_idle 1, which is Linux's default, and 0; with 1, and a byte every
0.1 s in the pause; with 1, and four connections in place of one. The limit is a trip, and the bytes at the rate.
"""

import argparse
import json
import selectors
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median

from fleet import Hosts

PORT, WARM = 5000, 0.1
CONTROLS = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")
#: By column, what differs from an exchange after a pause with Linux's defaults.
COLUMNS = {
    "no pause": {"pause": 0.0},
    "after a pause": {},
    "slow_start_after_idle 0": {"slow_start": 0},
    "kept warm": {"warm": True},
    "4 connections": {"connections": 4},
}


class Peers:
    """The connections of one host to each other one. ``control``: their congestion control."""

    def __init__(self, rank, addresses, connections, control):
        self._sockets = []
        with socket.create_server((addresses[rank], PORT), backlog=1000) as server:
            for lower in addresses[:rank]:
                self._sockets += [_connected((lower, PORT)) for _ in range(connections)]
            for _ in range((len(addresses) - 1 - rank) * connections):
                self._sockets.append(server.accept()[0])
        for connection in self._sockets:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, control.encode())
            connection.setblocking(False)

    def exchange(self, size):
        """Sends so many bytes on each connection, and returns when as many have come on each."""
        data = memoryview(bytes(size))
        left = {connection: [size, size] for connection in self._sockets}  # to be sent, to be received
        with selectors.DefaultSelector() as selector:
            for connection in left:
                selector.register(connection, selectors.EVENT_READ | selectors.EVENT_WRITE)
            while selector.get_map():
                for key, events in selector.select():
                    ends = left[key.fileobj]
                    if events & selectors.EVENT_WRITE:
                        ends[0] -= key.fileobj.send(data[: ends[0]])
                    if events & selectors.EVENT_READ and ends[1]:
                        ends[1] -= len(key.fileobj.recv(min(ends[1], 1 << 18)))
                    wanted = selectors.EVENT_WRITE * bool(ends[0]) | selectors.EVENT_READ * bool(ends[1])
                    if not wanted:
                        selector.unregister(key.fileobj)
                    elif wanted != key.events:
                        selector.modify(key.fileobj, wanted)


def _connected(address):
    for _ in range(200):
        try:
            return socket.create_connection(address)
        except ConnectionRefusedError:
            time.sleep(0.05)
    raise TimeoutError(f"{address} was not reached")


def rank(settings):
    """On one host: prints the seconds of each exchange. The hosts share a clock, and begin by what the input says."""
    settings = json.loads(settings)
    peers = Peers(settings["rank"], settings["addresses"], settings["connections"], settings["control"])
    size, found = settings["bytes"] // settings["connections"], []
    print("ready", flush=True)
    begin = float(sys.stdin.readline())
    for _ in range(settings["times"]):
        for _ in range(round(settings["pause"] / WARM) if settings["warm"] else 0):
            time.sleep(WARM)
            peers.exchange(1)
        time.sleep(max(0.0, begin - time.time()))
        start = time.time()
        peers.exchange(size)
        found.append(time.time() - start)
        begin = max(begin, start) + settings["pause"]
        begin += 1.0 if settings["pause"] else 0.0
    print(json.dumps(found))


def measured(hosts, given, control, pause, warm=False, connections=1, slow_start=1):
    """The median over all exchanges but the first three of the slowest host's seconds."""
    numbers = range(given.hosts)
    for number in numbers:
        setting = f"net.ipv4.tcp_slow_start_after_idle={slow_start}"
        subprocess.run(["ip", "netns", "exec", hosts.name(number), "sysctl", "-qw", setting], check=True)
    settings = {"addresses": [hosts.address(n) for n in numbers], "control": control, "pause": pause, "warm": warm}
    settings |= {"connections": connections, "bytes": given.bytes, "times": given.times + 3}
    with ExitStack() as stack:
        ranks = []
        for number in numbers:
            order = json.dumps({**settings, "rank": number})
            command = ["ip", "netns", "exec", hosts.name(number), sys.executable, __file__, "--rank", order]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            ranks.append(stack.enter_context(subprocess.Popen(command, **pipes)))
        for process in ranks:
            process.stdout.readline()  # ready
        begin = time.time() + 1
        for process in ranks:
            print(begin, file=process.stdin, flush=True)
        seconds = [json.loads(process.communicate()[0]) for process in ranks]
    return median(list(map(max, zip(*seconds, strict=True)))[3:])


def main(given):
    # Not in the ranks: torch takes seconds.
    from hvd_compress.cli.network import bandwidth, duration
    from hvd_compress.cli.processes import exit_on_signals

    sys.path.append(str(Path(__file__).resolve().parents[1] / "experiments"))
    import table

    rows = []
    with exit_on_signals(), Hosts(given.hosts, given.rate, given.delay) as hosts:
        for control in given.controls:
            cells = {"congestion control": control}
            for column in given.columns:
                differs = {"pause": given.pause, **COLUMNS[column]}
                cells[column] = f"{measured(hosts, given, control, **differs):.3f}"
            rows.append(cells)
            print(cells, file=sys.stderr, flush=True)
    limit = duration(given.delay) + 8 * (given.hosts - 1) * given.bytes / bandwidth(given.rate)
    print(table.markdown(rows, left=1))
    print(f"Limit: {limit:.3f} s.")


def parsed():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--delay", default="25ms", help="one way")
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--bytes", type=int, default=1_500_000, help="from each host to each other one")
    parser.add_argument("--pause", type=float, default=2.0, help="in seconds")
    parser.add_argument("--times", type=int, default=6)
    parser.add_argument("--controls", nargs="*", default=CONTROLS.read_text().split())
    parser.add_argument("--columns", nargs="*", default=[*COLUMNS], choices=COLUMNS)
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    given = parsed()
    if given.rank:
        rank(given.rank)
    else:
        main(given)
