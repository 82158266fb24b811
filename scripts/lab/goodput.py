#!/usr/bin/env python3
"""The share of all local steps that count in the end, when peers on torchft are killed and come back.

    .venv/bin/python scripts/lab/goodput.py --size 30 --kill-every 60 15

As torchft's own test of Llama on 30 replica groups, with steps that sleep (scripts/lab/peer.py), on a real lighthouse.
In every --kill-every seconds, at a random time, a random peer is killed by SIGKILL, and --restart seconds later another
one joins. Seconds of a step, between kills, of a restart, and of the run are --scale times those on this machine. A
step counts if its peer has committed a round after it. As root, each peer is a host of scripts/lab/netlab.sh: on one
host, 30 that connect at once may wait seconds for the name server. Prints a row for each --kill-every:

- steps that count: of those that peers have begun. Lost are the steps of killed peers since their last round.
- of the time: the seconds of the steps that count, of the peers times the run. Restarts and joining are lost here, too,
  and rounds, in which all peers share this machine's cores.
"""

import argparse
import os
import random
import signal
import sys
import time
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path

import peer
from fleet import Fleet, Hosts

from hvd_compress.cli.processes import exit_on_signals

sys.path.append(str(Path(__file__).resolve().parents[1] / "experiments"))

import table


class Counting(peer.Training):
    """Writes how many local steps it has begun to ``FOLDER/NAME.steps``, and with each event."""

    def __init__(self, lighthouse, name, settings):
        self.steps = 0
        self._file = os.open(Path(settings["folder"], f"{name}.steps"), os.O_WRONLY | os.O_CREAT)
        super().__init__(lighthouse, name, settings)

    def say(self, event, **more):
        super().say(event, steps=self.steps, **more)

    def train(self):
        self.steps += 1
        os.pwrite(self._file, self.steps.to_bytes(8, "little"), 0)
        super().train()


def steps_of(fleet, one):
    """The local steps that a peer has begun, and those of them that count."""
    file = fleet.folder / f"{one.name}.steps"
    begun = int.from_bytes(file.read_bytes(), "little") if file.exists() else 0
    return begun, max((event["steps"] for event in one.events("round")), default=0)


def run(given, kill_every, seed=0):
    """A row of the table."""
    chance, real = random.Random(seed), 1 / given.scale
    settings = dict(
        rounds=10**9, period=given.period, pause=given.step * real, timeout=given.timeout, width=given.width
    )
    settings |= dict(min_peers=given.size // 2 + 1, recipe="low_bit", quorum_retries=40)
    links = Hosts(given.size + 1, "none") if os.geteuid() == 0 else nullcontext()
    times = given.join_timeout, given.heartbeat_timeout
    with links as hosts, Fleet(Path(__file__), *times, hosts=hosts, **settings) as fleet:
        fleet.add(given.size)
        fleet.wait(lambda: all(one.events("joined") for one in fleet.peers), 300, "the first peers")
        fleet.wait_for_rounds(2, 300)
        before = sum(steps_of(fleet, one)[0] for one in fleet.peers)
        begin = time.time()
        kills = [begin + (n + chance.random()) * kill_every * real for n in range(int(given.seconds / kill_every))]
        events = [(at, "kill") for at in kills] + [(at + given.restart * real, "comes back") for at in kills]
        for at, event in sorted([*events, (begin + given.seconds * real, "end")]):
            fleet.wait(lambda at=at: time.time() >= at, 10**6, event)
            if event == "end":
                break
            if event == "kill":
                chance.choice([one for one in fleet.staying if one.alive]).send(signal.SIGKILL)
            else:
                fleet.add()
        seconds = time.time() - begin
        begun = sum(steps_of(fleet, one)[0] for one in fleet.peers) - before
        killed = [steps_of(fleet, one) for one in fleet.peers if one.ends]
        counts = begun - sum(steps - counted for steps, counted in killed)
        fleet.wait_for_rounds(1, 300)  # those of the others count
        rounds = [event for one in fleet.peers for event in one.events("round") if event["at"] >= begin]
        pauses = [
            after["at"] - earlier["at"] for one in fleet.staying for earlier, after in pairwise(one.events("round"))
        ]
        different = len(fleet.different())
        return {
            "a kill every, s": f"{kill_every:g}",
            "kills": len(killed),
            "steps": f"{begun:,}",
            "steps that count": f"{100 * counts / begun:.1f} %",
            "of the time": f"{100 * counts * given.step * real / (given.size * seconds):.1f} %",
            "rounds": max(event["step"] for event in rounds) - min(event["step"] for event in rounds) + 1,
            "s between rounds": f"{max(pauses) * given.scale:.0f}",
            **({"different": different} if different else {}),
        }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=30, help="number of peers")
    parser.add_argument("--kill-every", type=float, nargs="*", default=[60.0, 15.0])
    parser.add_argument("--seconds", type=float, default=1200.0, help="of the run")
    parser.add_argument("--scale", type=float, default=1.0, help="how many times faster than stated")
    parser.add_argument("--step", type=float, default=1.0, help="seconds of a local step")
    parser.add_argument("--period", type=int, default=30, help="local steps of a round")
    parser.add_argument("--restart", type=float, default=30.0, help="seconds until a killed peer comes back")
    parser.add_argument("--timeout", type=float, default=10.0, help="of collectives; this and the next ones unscaled")
    parser.add_argument("--join-timeout", type=float, default=60.0, help="of the lighthouse")
    parser.add_argument("--heartbeat-timeout", type=float, default=1.5, help="of the lighthouse")
    parser.add_argument("--width", type=int, default=64, help="of the model: 5,500 weights")
    parser.add_argument("--peers", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.peers:
        peer.serve(Counting)
        return
    rows = []
    for kill_every in given.kill_every:
        rows.append(run(given, kill_every))
        print(rows[-1], file=sys.stderr, flush=True)
    print(table.markdown(rows, left=1))


if __name__ == "__main__":
    with exit_on_signals():
        main()
