"""Replica groups of two ranks on torchft, sharded by FSDP2: all ranks of a group commit a round, or none."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from members import Lighthouse
from models import mixed_model

from hvd_compress import LocalSteps, Quantized, recipes

pytest.importorskip("torchft", reason="torchft is not installed")
coordination = pytest.importorskip("torchft.coordination")
SCRIPT = str(Path(__file__).with_name("replica_group.py"))


class Group:
    """The processes of tests/peers/replica_group.py, and the events that its ranks have written."""

    def __init__(self, folder, name, address, settings, fates):
        self._folder, self.name = folder, name
        for rank, fate in fates.items():
            self.tell(rank, fate)
        self.process = subprocess.Popen(
            [sys.executable, SCRIPT, str(folder), name, address, json.dumps(settings)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self.numbers = [int(number) for number in self.process.stdout.readline().split()]

    def tell(self, rank, fate):
        (self._folder / f"{self.name}-{rank}.fate").write_text(fate)

    def events(self, rank, kind=None):
        path = self._folder / f"{self.name}-{rank}.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        found = [json.loads(line) for line in lines if line.endswith("\n")]
        return [event for event in found if kind in (None, event["event"])]

    def count(self, kind):
        """Of the rank that has fewer of them."""
        return min(len(self.events(rank, kind)) for rank in range(2))

    @property
    def alive(self):
        return self.process.poll() is None

    def errors(self):
        return "".join((self._folder / f"{self.name}-{rank}.err").read_text()[-3000:] for rank in range(2))

    def end(self):
        self.process.terminate()
        self.process.wait(20)
        self.process.stdout.close()


class Groups:
    """A lighthouse and replica groups. A context that ends them all."""

    def __init__(self, folder, min_replicas=1, **settings):
        self.folder, self.settings, self.all, self._min_replicas = folder, settings, [], min_replicas

    def __enter__(self):
        self._lighthouse = coordination.LighthouseServer(
            bind="[::]:0",
            min_replicas=self._min_replicas,
            join_timeout_ms=2000,
            heartbeat_timeout_ms=1000,
            quorum_tick_ms=20,
        )
        return self

    def __exit__(self, *error):
        for group in self.all:
            group.end()
        self._lighthouse.shutdown()

    def add(self, name, **fates):
        fates = {int(rank.removeprefix("rank")): fate for rank, fate in fates.items()}
        self.all.append(Group(self.folder, name, self._lighthouse.address(), self.settings, fates))
        return self.all[-1]

    def wait(self, condition, *alive, timeout=90.0):
        """Until ``condition()``. ``alive``: the groups that must not end."""
        deadline = time.monotonic() + timeout
        while not condition():
            for group in alive:
                assert group.alive, f"{group.name} has ended: {group.errors()}"
            assert time.monotonic() < deadline, {g.name: [g.events(rank)[-2:] for rank in range(2)] for g in self.all}
            time.sleep(0.05)

    def wait_for_rounds(self, count, *groups, together=None):
        """So many more rounds of each, which ``together`` groups have exchanged."""
        before = [[len(group.events(rank, "round")) for rank in range(2)] for group in groups]

        def came():
            for group, counts in zip(groups, before, strict=True):
                for rank, had in enumerate(counts):
                    new = group.events(rank, "round")[had:]
                    if sum(together in (None, event["groups"]) for event in new) < count:
                        return False
            return True

        self.wait(came, *groups)

    def check(self):
        """After each round, the groups had equal common weights, and the ranks of a group have decided equally."""
        hashes = defaultdict(set)
        for group in self.all:
            decisions = [[(e["event"], e["step"]) for e in group.events(rank)] for rank in range(2)]
            shared = min(map(len, decisions))
            assert decisions[0][:shared] == decisions[1][:shared], group.name
            for rank in range(2):
                for event in group.events(rank, "round"):
                    assert event["same"]
                    hashes[rank, event["step"]].add(event["hash"])
        assert {place for place, found in hashes.items() if len(found) > 1} == set()


def test_groups_lose_exchanges_ranks_and_each_other(tmp_path):
    with Groups(tmp_path) as groups:
        first, second = groups.add("a0"), groups.add("b1")
        groups.wait_for_rounds(2, first, second, together=2)

        # One shard's exchange fails: no rank commits the round.
        for fate in ("cut", "unsure"):
            before = first.count("taken back")
            first.tell(1, f"{fate} 0")
            groups.wait(lambda n=before: min(g.count("taken back") for g in (first, second)) > n, first, second)
            groups.wait_for_rounds(2, first, second, together=2)
        lost = [{e["step"] for e in g.events(rank, "taken back")} for g in (first, second) for rank in range(2)]
        assert len(set.intersection(*lost)) >= 2, lost

        # One rank of a group dies: its group ends, the other one goes on.
        second.tell(1, "exchange 0")
        groups.wait(lambda: not second.alive, first)
        groups.wait_for_rounds(2, first, together=1)
        third = groups.add("c2")
        groups.wait_for_rounds(2, first, third, together=2)
        for rank in range(2):  # its own shards of the optimizer's state
            (joined,) = third.events(rank, "joined")
            (source,) = [event for event in first.events(rank, "round") if event["step"] == joined["step"]]
            assert joined["moments"] == source["moments"] and joined["hash"] == source["hash"]
        assert joined["moments"] != third.events(0, "joined")[0]["moments"]

        # One rank of a group is not healed, and the other one is.
        fourth = groups.add("d3", rank1="unhealed 0")
        groups.wait(lambda: not fourth.alive, first, third)
        assert "could not be healed: start all ranks of the group again" in fourth.errors()
        groups.wait_for_rounds(2, first, third, together=2)

        # A whole group dies.
        for number in first.numbers:
            os.kill(number, signal.SIGKILL)
        groups.wait_for_rounds(2, third, together=1)
        losses = [event["loss"] for event in third.events(0, "round")]
        assert losses[-1] < first.events(0, "round")[0]["loss"]
        groups.check()


@pytest.mark.slow
def test_a_rank_that_stands_still_takes_no_other_group_down(tmp_path):
    """It comes back after the timeout of an exchange, and its group with it."""
    with Groups(tmp_path, timeout=4.0) as groups:
        first, second = groups.add("a0"), groups.add("b1")
        groups.wait_for_rounds(2, first, second, together=2)
        first.tell(1, "stop 0")
        groups.wait(lambda: second.count("taken back"), first, second)
        os.kill(first.numbers[1], signal.SIGCONT)
        groups.wait_for_rounds(3, first, second, together=2)
        groups.check()


@pytest.mark.slow
def test_a_checkpoint_of_one_group_is_loaded_by_all(tmp_path):
    with Groups(tmp_path, min_replicas=2, rounds=4) as groups:
        first, second = groups.add("a0"), groups.add("b1")
        groups.wait(lambda: not (first.alive or second.alive))
        groups.settings |= {"rounds": 8, "loads": "a0"}
        third, fourth = groups.add("c2"), groups.add("d3")
        groups.wait(lambda: not (third.alive or fourth.alive))
        for rank in range(2):
            (saved,) = first.events(rank, "end")
            for group in (third, fourth):
                assert group.process.returncode == 0, group.errors()
                (joined,), (end,) = (group.events(rank, kind) for kind in ("joined", "end"))
                assert (saved["step"], joined["step"], end["step"]) == (4, 5, 8)
                assert joined["moments"] == saved["moments"] != 0
        groups.check()


def test_a_delay_is_refused():
    member, model = Lighthouse().collectives(0), mixed_model()
    member.group_size = 2
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"delay must be 0 with replica groups of several ranks \(2 here\), got 1"):
        recipes.low_bit(model, sgd, 4, delay=1, collectives=member)
    LocalSteps(Quantized(model, collectives=member), sgd, 4)
