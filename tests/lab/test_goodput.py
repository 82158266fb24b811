"""scripts/lab/goodput.py: which steps count, and a small run."""

import subprocess
import sys
from types import SimpleNamespace

import goodput
import pytest
from launch import ROOT


def test_a_step_counts_if_a_round_was_committed_after_it(tmp_path):
    (tmp_path / "peer1.steps").write_bytes((17).to_bytes(8, "little"))
    fleet = SimpleNamespace(folder=tmp_path)

    def peer(name, *steps):
        return SimpleNamespace(name=name, events=lambda kind: [{"steps": n} for n in steps if kind == "round"])

    assert goodput.steps_of(fleet, peer("peer1", 4, 12)) == (17, 12)
    assert goodput.steps_of(fleet, peer("peer2")) == (0, 0)  # killed before its first step


@pytest.mark.slow
def test_most_steps_of_a_small_fleet_count():
    pytest.importorskip("torchft", reason="torchft is not installed")
    given = "--size 4 --kill-every 10 --seconds 40 --step 0.2 --period 5 --restart 5 --heartbeat-timeout 1"
    command = f"{sys.executable} {ROOT}/scripts/lab/goodput.py {given}"
    done = subprocess.run(command.split(), capture_output=True, text=True, check=True)
    cells = done.stdout.splitlines()[2].split("|")
    kills, steps, counts = int(cells[2]), int(cells[3].replace(",", "")), float(cells[4].replace("%", ""))
    assert kills >= 3 and steps > 100 and 80 < counts <= 100 and "different" not in done.stdout, done.stdout
