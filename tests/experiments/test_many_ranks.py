"""The table of many ranks: made of stored runs, and the one that the documentation shows."""

from pathlib import Path

import many_ranks
import pytest
import train
from experiment.files import plain
from experiment.quality import BITS_PER_BYTE

PAGE = Path(__file__).resolve().parents[2] / "docs" / "local_steps.md"


def result(setting, bits, **config):
    run = many_ranks.run_of(*setting)
    config = {**plain(vars(train.parse(list(run.arguments)))), **config}
    return {"config": config, "ranks": run.ranks, BITS_PER_BYTE.key: bits}


def test_runs_are_found_by_their_settings():
    dense, length_4 = ("muon", "dense", 4, "3e-3"), ("muon", "length", 4, "3e-3")
    plain_16 = ("muon", "plain", 16, "3e-3")
    runs = [
        result(plain_16, 9.0, seed=1),
        result(plain_16, 9.0, local_steps=5),
        result(length_4, 9.0, delay=1),
        result(dense, 2.0),
        result(plain_16, 2.2),
        result(length_4, 1.99),
    ]
    (row,) = [row for row in many_ranks.rows(runs) if (row["optimizer"], row["learning rate"]) == ("muon", "3e-3")]
    assert row["dense"] == "2.000" and row["plain, 16 ranks"] == "2.200 (+10.0%)"
    assert row["restored, 4 ranks"] == "1.990 (-0.5%)" and row["plain, 4 ranks"] == row["restored, 16 ranks"] == "-"


def test_the_documentation_shows_the_stored_runs(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["many_ranks.py"])
    many_ranks.main()
    printed = capsys.readouterr().out
    assert printed.count("\n") > 5 and printed in PAGE.read_text()


@pytest.mark.parametrize("kind", many_ranks.KINDS)
def test_runs_are_trained_with_their_settings(kind):
    config = many_ranks.run_of("adamw", kind, 16, "3e-3").configuration()
    assert config["restore_length"] == {"dense": None, "plain": False, "length": True}[kind]
    assert config["batch_size"] * config["ranks"] == 32 and config["lr"] == 3e-3
