"""Result files: one run a line, each name once, whatever writes or is killed at the same time."""

import subprocess
import sys
from argparse import ArgumentTypeError
from pathlib import Path

import pytest
from experiment import result_file
from experiment.result_file import read_runs, write_run

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts" / "experiments"


def test_runs_are_lines_and_a_run_replaces_that_of_its_name(tmp_path):
    file = tmp_path / "new" / "runs.jsonl"
    for name, value in (("iwp-0.3", 1), ("a@b", None), ("iwp-0.3", float("inf"))):
        write_run(file / name, {"value": value, "history": [{"epoch": 1}]})
    assert file.read_text().splitlines() == [
        '{"name":"iwp-0.3","value":Infinity,"history":[{"epoch":1}]}',
        '{"name":"a@b","value":null,"history":[{"epoch":1}]}',
    ]
    found = read_runs(file)
    assert list(found) == ["iwp-0.3", "a@b"] and found["iwp-0.3"]["value"] == float("inf")
    write_run(file / "a@b", found["a@b"])
    assert read_runs(file) == found


def test_a_killed_process_leaves_the_file_as_it_was(tmp_path, monkeypatch):
    def killed(self, target):
        raise KeyboardInterrupt

    file = tmp_path / "runs.jsonl"
    write_run(file / "one", {"value": 1})
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "replace", killed)
        write_run(file / "two", {"value": 2})
    assert list(read_runs(file)) == ["one"]
    write_run(file / "three", {"value": 3})
    assert list(read_runs(file)) == ["one", "three"]


def test_processes_write_at_the_same_time(tmp_path):
    program = """
import sys; sys.path.insert(0, sys.argv[1])
from pathlib import Path
from experiment.result_file import write_run
for number in range(100):
    write_run(Path(sys.argv[2]) / f"{sys.argv[3]}-{number}", {"value": number})
"""
    file = tmp_path / "runs.jsonl"
    writers = [
        subprocess.Popen([sys.executable, "-c", program, str(SCRIPTS), str(file), str(number)]) for number in range(3)
    ]
    assert [writer.wait(60) for writer in writers] == [0, 0, 0]
    assert set(read_runs(file)) == {f"{writer}-{number}" for writer in range(3) for number in range(100)}


@pytest.mark.parametrize("wrong", ["result.json", "runs.jsonl", "runs.json/name"])
def test_a_wrong_place_is_named(wrong):
    assert result_file.run_path("runs.jsonl/name") == Path("runs.jsonl/name")
    with pytest.raises(ArgumentTypeError, match=f"{wrong}: expected FILE.jsonl/NAME"):
        result_file.run_path(wrong)
