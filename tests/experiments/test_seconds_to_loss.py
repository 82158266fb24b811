"""scripts/experiments/seconds_to_loss.py: a table of stored trainings and steps; and steps on hosts."""

import argparse
import sys
from pathlib import Path

import pytest
import seconds_to_loss
import table
from experiment.result_file import read_runs, write_run
from launch import finish, needs_hosts, start


@pytest.fixture
def results(tmp_path, monkeypatch):
    """Trainings by which dense reaches 2 bits after 150 steps, low_bit after 300; another rate is worse."""
    for name, rate, bits in (
        ("none@muon-adamw-6e-3-0", 6e-3, (3.0, 1.0, 1.0)),
        ("none@muon-adamw-3e-3-0", 3e-3, (2.0, 2.0, 2.0)),
        ("quantized@recipe-3e-3-0", 3e-3, (3.0, 2.5, 2.0)),
    ):
        tests = enumerate(bits, 1)
        history = [{"epoch": i, "step": 100 * i, "test_bits_per_byte": b, "seconds": 1.0} for i, b in tests]
        run = {"test_bits_per_byte": bits[-1], "history": history, "steps": 300, "epochs": 3}
        run["config"] = {"lr": rate, "seed": 0}
        write_run(tmp_path / "gpt-recipe" / "runs.jsonl" / name, run)
    monkeypatch.setattr(seconds_to_loss, "RESULTS", tmp_path)
    monkeypatch.setattr(seconds_to_loss, "TARGETS", (2.0,))
    return tmp_path


def test_seconds_are_steps_times_the_time_of_a_step_on_the_link(results):
    for number, link in enumerate(seconds_to_loss.LINKS, 1):
        for exchange in seconds_to_loss.EXCHANGES:
            path = results / "gpt-links" / "runs.jsonl" / seconds_to_loss.name_of(link, exchange)
            write_run(path, {"step_ms_median": 100.0 * number})
    rows = seconds_to_loss.rows(argparse.Namespace(out=results / "gpt-links"))
    assert [row["seconds to 2"] for row in rows] == ["15", "15", "30", "30", "30", "60", "45", "45", "90"]


def test_the_table_of_the_pages_is_of_the_stored_runs():
    rows = seconds_to_loss.rows(argparse.Namespace(out=seconds_to_loss.RESULTS / "gpt-links"))
    assert table.markdown(rows, left=2) in (seconds_to_loss.RESULTS.parent / "benchmarks.md").read_text()


def test_a_row_is_trained_at_the_rate_that_was_best_of_it(results):
    assert seconds_to_loss.curve("none@muon-adamw")["config"]["lr"] == 6e-3
    with pytest.raises(ValueError, match="gpt-recipe has no runs of other"):
        seconds_to_loss.curve("other")


@pytest.mark.slow
@needs_hosts
def test_measures_steps_of_each_link_and_exchange(results, tmp_path):
    changed = f"s.RESULTS = pathlib.Path({str(results)!r}); s.LINKS = {{'here': ('none', None)}}; s.HOSTS = 2"
    folder = str(Path(seconds_to_loss.__file__).parent)
    code = f"import pathlib, sys; sys.path.insert(0, {folder!r}); import seconds_to_loss as s; {changed}; s.main()"
    process = start([sys.executable, "-c", code, "--measure", "--steps", "3", "--out", str(tmp_path / "out")])
    assert finish(process, 300).count("| here") == 3
    periods = {name: run["config"]["local_steps"] for name, run in read_runs(tmp_path / "out" / "runs.jsonl").items()}
    assert periods == {"none-dense": None, "none-fp16": None, "none-low_bit": 3}
