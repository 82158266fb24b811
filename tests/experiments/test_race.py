"""scripts/experiments/race.py: when a target was reached, the comparison, reports; and a race on two hosts."""

import sys

import pytest
import race
from experiment.result_file import read_runs, write_run
from launch import finish, needs_hosts, start


def result(*tests, step_ms=100.0):
    history = [{"epoch": i + 1, "test_accuracy": a, "seconds": 10.0 * (i + 1)} for i, a in enumerate(tests)]
    measured = {"backend": "mpi", "wire_bytes_per_step": 2e6, "step_ms_median": step_ms, "test_accuracy": tests[-1]}
    return {"history": history, "steps": 10 * len(tests), "epochs": len(tests), **measured}


def test_seconds_are_those_to_the_first_time_at_the_target():
    assert race.reached(result(0.1, None, 0.7, 0.6), 0.7) == (30.0, 30.0)
    assert race.reached(result(0.1, None, 0.7, 0.6), 0.4) == (20.0, 20.0), "interpolated between two tests"
    assert race.reached(result(0.5, 0.1, 0.7), 0.4) == (10.0, 10.0)
    assert race.reached(result(0.1, 0.69), 0.7) is None


def test_bits_per_byte_are_reached_from_above():
    run = result(4.0, 3.0, 2.0)
    for entry in (run, *run["history"]):
        entry["test_bits_per_byte"] = entry.pop("test_accuracy")
    assert race.reached(run, 2.5) == (25.0, 25.0)
    assert race.reached(run, 1.9) is None
    rows = cells(race.markdown({"1gbit": {"none": run}}, 3.0, "none"))
    assert rows[0][-1] == "final bits per byte" and rows[1][3:] == ["20", "20", "1.00", "2.0000"]


def cells(text):
    """The rows of Markdown tables, without rules."""
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line[:2] == "| "]


def test_compares_with_the_first_method_where_it_got_there():
    found = {
        "100mbit": {"none": result(0.5, 0.6, 0.7), "iwp": result(0.7)},
        "1gbit": {"iwp": result(0.7)},
        "none": {"none": result(0.1), "iwp": result(0.7)},
    }
    rows = cells(race.markdown(found, 0.7, "none"))
    assert rows[0][3:6] == ["steps to 0.7", "seconds", "speed-up"]
    assert [row[:2] + row[3:6] for row in rows[1:]] == [
        ["100mbit", "none (mpi)", "30", "30", "1.00"],
        ["100mbit", "iwp (mpi)", "10", "10", "3.00"],
        ["1gbit", "iwp (mpi)", "10", "10", "-"],
        ["none", "none (mpi)", "-", "-", "-"],
        ["none", "iwp (mpi)", "10", "10", "-"],
    ]


def raced(folder, runs, **changes):
    """A folder with results of such names."""
    folder.mkdir()
    for name, tests in runs.items():
        made = {**result(*tests), "train_loss": 1.0, "replicas_equal": True, "config": {"model": folder.name}}
        write_run(folder / "runs.jsonl" / name, {**made, **changes})
    return folder


def test_a_race_is_read_from_its_folder_slow_links_and_dense_first(tmp_path):
    names = ("none-iwp@16-mpi", "1gbit-ddp-iwp-ddp", "1gbit-none-mpi", "900mbit-none-mpi")
    found = race.read(raced(tmp_path / "race", dict.fromkeys(names, (0.7,))))
    assert [(rate, list(of_rate)) for rate, of_rate in found.items()] == [
        ("900mbit", ["none"]), ("1gbit", ["none", "ddp-iwp"]), ("none", ["iwp@16"])
    ]  # fmt: skip
    assert found["1gbit"]["ddp-iwp"]["backend"] == "ddp"
    apart = raced(tmp_path / "apart", {"1gbit-none-mpi": (0.7,)}, replicas_equal=False)
    with pytest.raises(ValueError, match="1gbit-none-mpi: its replicas differ"):
        race.read(apart)


@pytest.mark.parametrize(
    "wrong", [["--rates", "fast"], ["--hosts", "1"], ["--methods", "none,magic"], ["--environment", "qsgd:A=1"]]
)
def test_refuses(wrong, tmp_path, capsys):
    with pytest.raises(SystemExit):
        race.parse(["--target", "0.5", "--out", str(tmp_path), *wrong])
    assert "error" in capsys.readouterr().err


@pytest.mark.slow
@needs_hosts
def test_a_race_on_two_hosts_is_run_once(tmp_path):
    pytest.importorskip("horovod.torch", reason="Horovod is not installed")
    options = ["--hosts", "2", "--rates", "1gbit", "--methods", "none,iwp", "--target", "0.01", "--out", str(tmp_path)]
    command = [sys.executable, race.__file__, *options]
    command += ["--environment", "iwp:HOROVOD_CYCLE_TIME=2"]
    command += ["--", "--data", "digits", "--epochs", "1", "--max-steps", "8", "--limit-train", "400"]
    seconds = []
    for _ in range(2):
        process = start(command)
        output = finish(process, timeout=240)
        if "no network namespaces" in output:
            pytest.skip(output)
        assert process.returncode == 0, output
        assert "none (mpi)" in (tmp_path / "race.md").read_text()
        written = list(read_runs(tmp_path / "runs.jsonl").values())
        assert [w["config"]["compression"] for w in written] == ["none", "iwp"]
        assert [w["config"]["settings"].get("HOROVOD_CYCLE_TIME") for w in written] == [None, "2"]
        seconds.append([w["seconds"] for w in written])
    assert seconds[0] == seconds[1]
    for other, says in (("iwp:HOROVOD_CYCLE_TIME=3", "'2', not '3'"), ("none:HOROVOD_CYCLE_TIME=2", "None, not '2'")):
        process = start([other if text == "iwp:HOROVOD_CYCLE_TIME=2" else text for text in command])
        assert f"HOROVOD_CYCLE_TIME {says}" in finish(process, timeout=240) and process.returncode == 2
    process = start(command[: command.index("--environment")] + command[command.index("--") :])
    assert "HOROVOD_CYCLE_TIME '2', not None" in finish(process, timeout=240) and process.returncode == 2
