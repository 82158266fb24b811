"""Peers that die, stop, come back and lose their lighthouse, in a training of local steps on torchft.

Runs peers of a small training (scripts/lab/peer.py) on this machine, makes events, one after the other, and waits after
each until those that stay have committed three more rounds. Prints a table: for each kind of event how often it was
made, the most rounds that a peer that stays has lost, and the longest time between two committed rounds; then whether
all committed weights were bit-equal. Exits with 1 if they were not, or if a peer that was to stay has ended.

    .venv/bin/python scripts/lab/chaos.py --peers 4 --repeat 5
"""

import argparse
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

LAB = Path(__file__).resolve().parent
ROOT = LAB.parents[1]
#: Points at which a peer kills itself, see scripts/lab/peer.py.
KILLS = ("forward", "quorum", "exchange", "voting", "voted")


class Peer:
    """A child of scripts/lab/peer.py, and the events that it has written. ``dies``: where it is to die, if anywhere."""

    def __init__(self, folder, name, dies, start):
        self.name, self._path = name, folder / name
        #: Whether it may end: it was killed, or told to.
        self.ends = False
        if dies:
            self.tell(dies)
        self.number = start({"folder": str(folder), "name": name})
        self._events, self._read = [], 0

    def events(self, kind=None):
        with suppress(FileNotFoundError), self._path.with_suffix(".jsonl").open() as log:
            log.seek(self._read)
            while (line := log.readline()).endswith("}\n"):
                self._events.append(json.loads(line))
                self._read = log.tell()
        return [event for event in self._events if kind in (None, event["event"])]

    @property
    def step(self):
        """Rounds that were committed when it has last written."""
        events = self.events()
        return events[-1]["step"] if events else 0

    @property
    def alive(self):
        with suppress(ProcessLookupError):
            os.kill(self.number, 0)
            return True
        return False

    def tell(self, word, ends=True):
        """Tells it where to die, or to ``end``. ``ends``: whether it may end then."""
        self.ends = ends
        self._path.with_suffix(".fate").write_text(word)

    def send(self, what):
        """Sends it a signal."""
        self.ends = self.ends or what == signal.SIGKILL
        with suppress(ProcessLookupError):
            os.kill(self.number, what)

    def errors(self):
        """The last lines that it has printed as errors."""
        lines = self._path.with_suffix(".err").read_text(errors="replace").splitlines()
        return "\n".join([line for line in lines if "[INFO]" not in line][-12:])


class Fleet:
    """A lighthouse and peers. A context that ends them all.

    Args:
        settings: of all peers, see scripts/lab/peer.py.
        join_timeout, heartbeat_timeout: of the lighthouse, in seconds.
    """

    def __init__(self, join_timeout=2.0, heartbeat_timeout=1.0, **settings):
        self._temporary = tempfile.TemporaryDirectory(prefix="hvd-compress.")
        self.folder, self.settings = Path(self._temporary.name), settings
        with socket.socket(socket.AF_INET6) as free:
            free.bind(("::", 0))
            self._port = free.getsockname()[1]
        self.address = f"http://localhost:{self._port}"
        self._timeouts = join_timeout, heartbeat_timeout
        self.peers, self._lighthouse = [], None

    def __enter__(self):
        self._parent = subprocess.Popen(
            [sys.executable, str(LAB / "peer.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        )
        try:
            self.start_lighthouse()
            self._parent.stdout.readline()  # ready
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error):
        self._parent.communicate("")  # the end of its input
        if self._lighthouse is not None:
            self.kill_lighthouse()
        self._temporary.cleanup()

    def start_lighthouse(self):
        join, heartbeat = (str(round(1000 * seconds)) for seconds in self._timeouts)
        program = shutil.which("torchft_lighthouse", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
        options = ["--min_replicas", str(self.settings.get("min_peers", 2)), "--bind", f"[::]:{self._port}"]
        options += ["--join_timeout_ms", join, "--heartbeat_timeout_ms", heartbeat, "--quorum_tick_ms", "20"]
        with (self.folder / "lighthouse.err").open("a") as log:
            self._lighthouse = subprocess.Popen([program, *options], stdout=log, stderr=log)
        self.wait(self._answers, 120, "the lighthouse")  # it imports torch, on cores that peers use

    def _answers(self):
        with socket.socket(socket.AF_INET6) as probe:
            return probe.connect_ex(("::1", self._port)) == 0

    def kill_lighthouse(self):
        self._lighthouse.kill()
        self._lighthouse.wait()

    def add(self, count=1, dies=""):
        """Starts peers. Returns the last of them."""
        for _ in range(count):
            self.peers.append(Peer(self.folder, f"peer{len(self.peers) + 1}", dies, self._start))
        return self.peers[-1]

    def _start(self, settings):
        line = json.dumps({**self.settings, "lighthouse": self.address, **settings})
        self._parent.stdin.write(f"{line}\n")
        self._parent.stdin.flush()
        return int(self._parent.stdout.readline())

    @property
    def staying(self):
        return [peer for peer in self.peers if not peer.ends]

    def wait(self, condition, timeout, what):
        """Returns when ``condition()`` is true. Raises ``TimeoutError`` after ``timeout`` seconds, ``RuntimeError`` if
        a peer has ended that was to stay."""
        deadline = time.monotonic() + timeout
        while not condition():
            for peer in self.staying:
                if not peer.alive and not any(event["event"] == "end" for event in peer.events()):
                    raise RuntimeError(f"{peer.name} has ended: {peer.errors()}")
            if time.monotonic() > deadline:
                states = ", ".join(f"{peer.name} at {peer.step}" for peer in self.staying)
                raise TimeoutError(f"{what} did not come in {timeout} s: {states}")
            time.sleep(0.02)

    def wait_for_rounds(self, count, timeout=60.0):
        """Waits until all peers that stay have committed so many more rounds, together."""
        first = max((peer.step for peer in self.staying), default=0)
        self.wait(lambda: all(peer.step >= first + count for peer in self.staying), timeout, f"{count} rounds")

    def different(self):
        """The numbers of committed rounds after which peers had different common weights."""
        hashes = defaultdict(set)
        for peer in self.peers:
            for event in peer.events("round"):
                hashes[event["step"]].add(event["hash"])
        return sorted(step for step, found in hashes.items() if len(found) > 1)


class Chaos:
    """Events in a fleet of ``size`` peers."""

    def __init__(self, fleet, size, seed, timeout):
        self.fleet, self.size, self.timeout, self._random = fleet, size, timeout, random.Random(seed)

    def any(self):
        return self._random.choice([peer for peer in self.fleet.staying if peer.alive])

    def kill_at(self, point):
        victim = self.any()
        victim.tell(point)
        self._gone(victim)

    def kill_at_random(self):
        time.sleep(self._random.random())
        self.any().send(signal.SIGKILL)

    def kill_two(self):
        for _ in range(2):
            self.any().send(signal.SIGKILL)

    def kill_in_healing(self):
        self._gone(self.fleet.add(dies="healing"))

    def kill_while_another_heals(self):
        """A peer joins, and the one from which it is to be healed dies."""
        before = list(self.fleet.staying)
        (self.fleet.folder / "serving.first").unlink(missing_ok=True)
        for peer in before:
            peer.tell("serving")
        joins = self.fleet.add()
        self.fleet.wait(lambda: any(not peer.alive for peer in before), 30, "the end of the peer that heals another")
        self.fleet.wait(lambda: joins.events("joined"), 60, "the peer that joins")
        for peer in before:  # the others are told to stay
            if peer.alive:
                peer.tell("nowhere", ends=False)

    def stop(self):
        victim = self.any()
        victim.send(signal.SIGSTOP)
        time.sleep(1.5 * self.timeout)
        victim.send(signal.SIGCONT)

    def restart_lighthouse(self):
        self.fleet.kill_lighthouse()
        time.sleep(self._random.random() * self.timeout)
        self.fleet.start_lighthouse()

    def come_back_after(self, rounds):
        self.any().send(signal.SIGKILL)
        self.fleet.wait_for_rounds(rounds)
        self.fleet.add()

    def fill(self):
        """Brings the fleet to its size."""
        missing = self.size - len(self.fleet.staying)
        if missing > 0:
            new = [self.fleet.add() for _ in range(missing)]
            self.fleet.wait(lambda: all(peer.events("joined") for peer in new), 60, "the new peers")
        self.fleet.wait_for_rounds(2)

    def _gone(self, victim):
        self.fleet.wait(lambda: not victim.alive, 60, f"the end of {victim.name}")


def measured(fleet, event, timeout):
    """Makes an event. Returns what it has cost the peers that were there before and stay: the most rounds that one has
    lost, and the longest time without a round."""
    before, begin = list(fleet.staying), time.time()
    event()
    fleet.wait_for_rounds(3, 60 + 4 * timeout)
    stay = [peer for peer in before if peer.alive]
    lost, longest = 0, 0.0
    for peer in stay:
        events = [e for e in peer.events() if e["at"] >= begin - 1.0]
        lost = max(lost, sum(e["event"] == "taken back" for e in events))
        times = [e["at"] for e in events if e["event"] == "round"]
        longest = max([longest, *(after - before for before, after in pairwise(times))])
    return lost, longest


def kinds(chaos, rejoin):
    found = {f"killed in {point}": lambda point=point: chaos.kill_at(point) for point in KILLS}
    found |= {
        "killed at any time": chaos.kill_at_random,
        "two killed at once": chaos.kill_two,
        "killed in healing": chaos.kill_in_healing,
        "killed while another heals": chaos.kill_while_another_heals,
        "stopped for 1.5 timeouts": chaos.stop,
        "lighthouse restarted": chaos.restart_lighthouse,
    }
    for rounds in rejoin:
        found[f"comes back after {rounds} rounds"] = lambda rounds=rounds: chaos.come_back_after(rounds)
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--peers", type=int, default=4)
    parser.add_argument("--repeat", type=int, default=5, help="events of each kind")
    parser.add_argument(
        "--rejoin", type=int, nargs="*", default=[1, 10, 100], help="rounds after which a peer comes back"
    )
    parser.add_argument("--only", default="", help="kinds of events that contain this text")
    parser.add_argument("--timeout", type=float, default=4.0, help="of torchft's collectives, in seconds")
    parser.add_argument("--recipe", default="low_bit")
    parser.add_argument("--options", type=json.loads, default={}, help="of the recipe, as JSON")
    parser.add_argument("--period", type=int, default=2)
    parser.add_argument("--pause", type=float, default=0.02, help="seconds of a local step")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    settings = dict(
        rounds=10**9,
        recipe=given.recipe,
        options=given.options,
        period=given.period,
        timeout=given.timeout,
        pause=given.pause,
        min_peers=2,
    )
    with Fleet(**settings) as fleet:
        chaos = Chaos(fleet, given.peers, given.seed, given.timeout)
        chaos.fill()
        memory = {peer.name: peer.events()[-1]["megabytes"] for peer in fleet.staying}
        print(f"{'event':32} {'times':>5} {'rounds lost':>12} {'s without a round':>18}", flush=True)
        for kind, event in kinds(chaos, given.rejoin).items():
            if given.only not in kind:
                continue
            found = []
            for _ in range(given.repeat):
                chaos.fill()
                found.append(measured(fleet, event, given.timeout))
            lost, longest = max(lost for lost, _ in found), max(seconds for _, seconds in found)
            print(f"{kind:32} {len(found):5} {lost:12} {longest:18.1f}", flush=True)
        grown = [peer.events()[-1]["megabytes"] - memory[peer.name] for peer in fleet.staying if peer.name in memory]
        rounds, different = max(peer.step for peer in fleet.staying), fleet.different()
        print(f"{rounds} rounds; different weights after {different or 'none'} of them; memory grown by {grown} MB")
        return int(bool(different))


if __name__ == "__main__":
    sys.exit(main())
