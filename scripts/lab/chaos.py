"""Peers that die, stop, are cut off, come back and lose their lighthouse, in a training of local steps on torchft.

Runs peers of a small training (scripts/lab/peer.py) on this machine, makes events, one after the other, and waits after
each until those that stay have committed three more rounds. Prints a table, of the worst of each kind of event: how
many rounds a peer that stays has taken back, the seconds between two committed rounds, and those of the peer itself
that was stopped or cut off; then the growth of memory, and whether all committed weights were bit-equal. Exits with 1
if they were not, or if a peer that was to stay has ended. As root, each peer is a host of scripts/lab/netlab.sh.

    .venv/bin/python scripts/lab/chaos.py --peers 4 --repeat 3

With --events, a run over hours, of so many events of random kinds: after every 20 it prints the table and begins with
another fleet, whose size, period, fragments and delay are random. SIGINT or SIGTERM ends it with the table.

    .venv/bin/python scripts/lab/chaos.py --events 200
"""

import argparse
import json
import os
import random
import signal
import sys
import time
from collections import defaultdict
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import pairwise

from fleet import Fleet, Hosts

from hvd_compress.cli.processes import exit_on_signals

#: Events of a fleet with --events.
EACH = 20
#: Points at which a peer kills itself, see scripts/lab/peer.py.
KILLS = ("forward", "quorum", "exchange", "voting", "voted")


class Chaos:
    """Events in a fleet of ``size`` peers. Those that a peer survives return it."""

    def __init__(self, fleet, size, chance, timeout):
        self.fleet, self.size, self.timeout, self._random = fleet, size, timeout, chance

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
        return victim

    def cut(self, timeouts):
        """Cuts the link of a peer, and mends it."""
        victim = self.any()
        self.fleet.hosts.cut(victim.host)
        time.sleep(timeouts * self.timeout)
        self.fleet.hosts.mend(victim.host)
        return victim

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


@dataclass
class Cost:
    """The worst of some events: rounds that a peer that stays has taken back, seconds between two committed rounds, and
    those of the peer that was stopped or cut off."""

    times: int = 0
    lost: int = 0
    seconds: float = 0.0
    own_seconds: float = 0.0

    def add(self, lost, seconds, own_seconds):
        self.times += 1
        self.lost = max(self.lost, lost)
        self.seconds, self.own_seconds = max(self.seconds, seconds), max(self.own_seconds, own_seconds)


@dataclass
class Results:
    """Of all fleets so far."""

    costs: dict[str, Cost] = field(default_factory=lambda: defaultdict(Cost))
    fleets: list[str] = field(default_factory=list)
    rounds: int = 0
    different: int = 0
    #: Fleets that were given up: a peer has ended that was to stay, or something did not come in time.
    failures: int = 0
    #: MB that a peer has grown, and rounds meanwhile.
    growth: list[tuple[float, int]] = field(default_factory=list)

    def event(self, fleet, kind, event, timeout):
        """Makes an event, and measures what it costs the peers that were there before and stay."""
        before, begin = list(fleet.staying), time.time()
        victim = event()
        fleet.wait_for_rounds(3, 60 + 8 * timeout)
        lost, longest = 0, {True: 0.0, False: 0.0}
        for peer in before:
            if not peer.alive:
                continue
            events = [e for e in peer.events() if e["at"] >= begin - 1.0]
            lost = max(lost, sum(e["event"] == "taken back" for e in events))
            times = [e["at"] for e in events if e["event"] == "round"]
            gaps = [after - before for before, after in pairwise(times)]
            longest[peer is victim] = max([longest[peer is victim], *gaps])
        self.costs[kind].add(lost, longest[False], longest[True])

    def end(self, fleet):
        """The fleet has made its last event."""
        self.rounds += max((peer.step for peer in fleet.peers), default=0)
        self.different += len(fleet.different())
        for peer in fleet.peers:
            rounds = peer.events("round")[100:]  # the first ones fill caches: 1 MB in 100 rounds
            if len(rounds) > 50:
                self.growth.append((rounds[-1]["megabytes"] - rounds[0]["megabytes"], len(rounds)))

    def print(self):
        print(f"| {'event':36} | times | rounds taken back | s between rounds | s of the peer itself |")
        print(f"|{'-' * 38}|{'-' * 7}|{'-' * 19}|{'-' * 18}|{'-' * 22}|")
        for kind, cost in self.costs.items():
            own = f"{cost.own_seconds:.1f}" if cost.own_seconds else ""
            print(f"| {kind:36} | {cost.times:5} | {cost.lost:17} | {cost.seconds:16.1f} | {own:>20} |")
        rounds = sum(count for _, count in self.growth)
        mean = 100 * sum(grown for grown, _ in self.growth) / rounds if rounds else 0.0
        worst = max((100 * grown / count for grown, count in self.growth), default=0.0)
        print(f"Fleets ({self.failures} before were given up): {'; '.join(self.fleets)}.")
        print(f"{self.rounds} rounds, after {self.different} of them weights differed.", end=" ")
        print(f"Memory of {len(self.growth)} peers: {mean:+.2f} MB in 100 rounds, the worst {worst:+.2f}.", flush=True)


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
    if chaos.fleet.hosts is not None:
        for timeouts in (1.5, 7):
            found[f"link cut for {timeouts} timeouts"] = lambda timeouts=timeouts: chaos.cut(timeouts)
    for rounds in rejoin:
        found[f"comes back after {rounds} rounds"] = lambda rounds=rounds: chaos.come_back_after(rounds)
    return found


def drawn(chance, given):
    """Size and settings of a random fleet."""
    period, fragments = chance.choice([2, 4, 8]), chance.choice([1, 2])
    options = {"fragments": fragments, "delay": chance.randint(0, min(2, period // fragments)), "bucket_mb": 0.01}
    return chance.randint(4, 8), {"period": period, "options": {**options, **given.options}}


def train(results, given, chance, size, settings, chosen):
    """A fleet, from its first event to its last. ``chosen(kinds)``: which events."""
    everywhere = dict(rounds=10**9, recipe=given.recipe, timeout=given.timeout, pause=given.pause, min_peers=2)
    links = Hosts(size + 2, "none") if os.geteuid() == 0 else nullcontext()
    results.fleets.append(f"{size} peers, period {settings['period']}, {settings['options']}")
    with links as hosts, Fleet(hosts=hosts, **everywhere, **settings) as fleet:
        chaos = Chaos(fleet, size, chance, given.timeout)
        try:
            events = kinds(chaos, given.rejoin)
            for kind in chosen([kind for kind in events if given.only in kind]):
                print(kind, file=sys.stderr, flush=True)
                chaos.fill()
                results.event(fleet, kind, events[kind], given.timeout)
        except (RuntimeError, TimeoutError):
            results.failures += 1
            raise
        finally:
            results.end(fleet)
            results.print()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=int, default=4)
    parser.add_argument("--repeat", type=int, default=5, help="events of each kind")
    parser.add_argument("--events", type=int, help="so many of random kinds, in random fleets")
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
    results, chance = Results(), random.Random(given.seed)
    if given.events is None:
        fixed = {"period": given.period, "options": given.options}
        train(results, given, chance, given.peers, fixed, lambda names: [n for n in names for _ in range(given.repeat)])
    for begun in range(0, given.events or 0, EACH):
        count = min(EACH, given.events - begun)
        try:
            train(results, given, chance, *drawn(chance, given), lambda names, k=count: chance.choices(names, k=k))
        except (RuntimeError, TimeoutError) as error:
            print(error, file=sys.stderr, flush=True)
    return int(results.different + results.failures > 0)


if __name__ == "__main__":
    with exit_on_signals():
        sys.exit(main())
