#!/usr/bin/env python3
"""What a round costs on torchft, by model and by rate of the links: seconds of the quorum, with waiting for the slowest
peer, of the commit, and of the exchange between them, with its compression.

    .venv/bin/python scripts/lab/peers_cost.py

With --delay 50ms, so long one way, also in trips: messages that wait for each other.

Peers of scripts/lab/peer.py are hosts of scripts/lab/netlab.sh, which needs root. A cell is the median over all peers
and rounds but the first ones.
"""

import argparse
import sys
from itertools import pairwise
from pathlib import Path
from statistics import median

from fleet import Fleet, Hosts

from hvd_compress.cli.network import duration
from hvd_compress.cli.processes import exit_on_signals

sys.path.append(str(Path(__file__).resolve().parents[1] / "experiments"))

import table


def seconds(fleet, skipped):
    """Of one round: in the quorum, in the commit, in the exchange."""
    rounds = []
    for peer in fleet.peers:
        for before, after in pairwise(peer.events("round")[skipped:]):
            quorum, commit, step = (b - a for a, b in zip(before["seconds"], after["seconds"], strict=True))
            rounds.append((quorum, commit, step - quorum - commit))
    return [median(column) for column in zip(*rounds, strict=True)]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=int, default=4)
    parser.add_argument("--rates", nargs="*", default=["100mbit", "1gbit"], help="of the links")
    parser.add_argument("--widths", type=int, nargs="*", default=[1170, 5460], help="of the model: 1.4 M, 30 M weights")
    parser.add_argument("--delay", default="0ms", help="of the links, one way")
    parser.add_argument("--recipe", default="low_bit")
    parser.add_argument("--rounds", type=int, default=10)
    given = parser.parse_args()
    rows, trip = [], duration(given.delay)
    delay = [given.delay] if trip else []
    for width in given.widths:
        for rate in given.rates:
            # Minutes: each peer gets the first one's weights, 720 MB of them together in the larger model.
            settings = dict(rounds=10**9, timeout=600.0, recipe=given.recipe, width=width, min_peers=given.peers)
            with (
                Hosts(given.peers + 1, rate, *delay) as hosts,
                Fleet(hosts=hosts, join_timeout=600.0, **settings) as fleet,
            ):
                fleet.add(given.peers)
                fleet.wait_for_rounds(2 + given.rounds, 1800)
                costs = dict(zip(("quorum", "commit", "exchange"), seconds(fleet, 2), strict=True))
                row = {"weights": f"{(width * width + 20 * width) / 1e6:.1f} M", "links": " ".join([rate, *delay])}
                row |= {f"{name}, s": f"{s:.3f}" for name, s in costs.items()}
                trips = " + ".join(f"{s / trip:.1f}" for s in costs.values()) if trip else ""
                rows.append(row | ({"trips": trips} if trip else {}))
                print(rows[-1], file=sys.stderr, flush=True)
    print(table.markdown(rows, left=2))


if __name__ == "__main__":
    with exit_on_signals():
        main()
