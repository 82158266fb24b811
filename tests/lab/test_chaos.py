"""scripts/lab/chaos.py: what it counts, which fleets it draws; and a run that is ended by a signal."""

import random
import signal
import subprocess
import sys
import time
from argparse import Namespace

import chaos
import pytest
from launch import ROOT, end, start


class Peer:
    def __init__(self, lines):
        self._lines, self.alive, self.step = lines, True, 100

    def events(self, kind=None):
        return [line for line in self._lines if kind in (None, line["event"])]


class Fleet:
    hosts = None

    def __init__(self, *peers):
        self.peers = self.staying = list(peers)

    def wait_for_rounds(self, count, timeout):
        pass

    def different(self):
        return [3]


def log(now, rounds, taken_back=0, megabytes=0.0):
    """Rounds at these seconds; ``megabytes`` more in each."""
    lines = [{"event": "round", "at": now + at, "megabytes": 100 + megabytes * n} for n, at in enumerate(rounds)]
    return [*lines, *[{"event": "taken back", "at": now + 1}] * taken_back]


def test_an_event_costs_what_the_worst_peer_has_lost():
    now, results = time.time(), chaos.Results()
    stopped = Peer(log(now, [-60, 0, 9], 1))
    fleet = Fleet(Peer(log(now, [-50, 0, 2], 3)), stopped, Peer(log(now, [0, 1, 4])))
    results.event(fleet, "stopped", lambda: stopped, 1.0)
    results.event(Fleet(Peer(log(now, [0, 5]))), "stopped", lambda: None, 1.0)
    assert results.costs["stopped"] == chaos.Cost(2, 3, pytest.approx(5.0), pytest.approx(9.0))


def test_memory_is_that_of_a_hundred_rounds(capsys):
    results = chaos.Results()
    results.end(Fleet(Peer(log(0, range(200), megabytes=0.1)), Peer(log(0, range(120), megabytes=5.0))))
    results.print()
    assert "after 1 of them weights differed. Memory of 1 peers: +9.90 MB in 100 rounds" in capsys.readouterr().out


def test_random_fleets_are_valid_and_cover_fragments_and_delay():
    given, chance = Namespace(options={"bits": 1}), random.Random(0)
    fleets = [chaos.drawn(chance, given) for _ in range(40)]
    for size, settings in fleets:
        options = settings["options"]
        assert 4 <= size <= 8 and options["bits"] == 1 and settings["period"] % options["fragments"] == 0
        assert options["delay"] <= settings["period"] // options["fragments"]
    found = {(settings["options"]["fragments"], settings["options"]["delay"]) for _, settings in fleets}
    assert found == {(fragments, delay) for fragments in (1, 2) for delay in (0, 1, 2)}


@pytest.mark.slow
def test_a_run_that_is_ended_prints_its_table():
    pytest.importorskip("torchft", reason="torchft is not installed")
    process = start([sys.executable, str(ROOT / "scripts" / "lab" / "chaos.py"), "--events", "50", "--only", "forward"])
    time.sleep(60)
    process.send_signal(signal.SIGTERM)
    try:
        output = process.communicate(timeout=60)[0]
    except subprocess.TimeoutExpired:
        pytest.fail(f"it did not end: {end(process)[-3000:]}")
    assert "| killed in forward" in output and "after 0 of them weights differed" in output, output[-3000:]
    assert process.returncode == 1
