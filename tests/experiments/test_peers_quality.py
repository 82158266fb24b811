"""scripts/experiments/peers_quality.py: its settings are comparable, and its table is made of stored runs."""

import pytest

pytest.importorskip("torchft", reason="torchft is not installed")

import peers_quality
from peers_quality import SETTINGS, kills_of


def test_all_peers_together_train_on_as_many_windows_in_a_round():
    assert {sum(setting.periods) for setting in SETTINGS.values()} == {4 * peers_quality.EACH_ROUND}
    steps = SETTINGS["ranks"]
    # Nobody waits: all rounds are equally long.
    assert len({period * time for period, time in zip(steps.periods, steps.milliseconds, strict=True)}) == 1


def test_a_peer_dies_every_hundred_steps_but_not_at_the_end():
    assert kills_of(SETTINGS["kills"], 1500) == list(range(25, 375, 25))
    assert kills_of(SETTINGS["kills"], 60) == [5, 10] and kills_of(SETTINGS["equal"], 1500) == []


def test_the_table_has_the_mean_of_the_seeds():
    def run(bits, steps=1500):
        return {"test_bits_per_byte": bits, "steps": steps, "seconds": 10.0, "kills": 14, "rounds_taken_back": 2}

    found = {"kills-1500-0": run(2.0), "kills-1500-1": run(3.0), "kills-60-0": run(9.0, 60)}
    equal, kills, *_ = peers_quality.rows(found, 1500)
    assert (kills["bits per byte"], kills["killed"], kills["rounds taken back"]) == ("2.500", "14", "2")
    assert equal["bits per byte"] == "-"
