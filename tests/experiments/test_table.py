"""scripts/experiments/table.py, and results of older runs."""

import sys

import table
from experiment import runs
from experiment.result_file import write_run


def result(compression="none", seed=0, accuracy=0.9, ranks=4, **config):
    history = [
        {"epoch": e, "train_loss": 1 / e, "test_accuracy": accuracy * e / 2, "wire_bytes": 1e6 * e, "seconds": e}
        for e in (1, 2)
    ]
    return {
        "test_accuracy": accuracy, "train_loss": 0.5, "wire_ratio": 40.0, "wire_ratio_last": 52.2,
        "wire_bytes_per_step": 12345.6, "step_ms_median": 20.0, "compress_ms_median": 1.5,
        "replicas_equal": True, "ranks": ranks, "history": history,
        "config": {"compression": compression, "seed": seed, "lr": 0.1, "json": f"{seed}.json", **config},
    }  # fmt: skip


def cells(text):
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]


def test_table_joins_seeds_and_names_what_differs():
    rows = cells(
        table.table(
            [
                result(),
                result("iwp", seed=0, accuracy=0.88, density=1 / 64, leaders=None),
                result("iwp", seed=1, accuracy=0.86, density=1 / 64, leaders=None),
                result("iwp", density=1 / 64, leaders=1),
                result("iwp", density=0.03, leaders=1),
            ]
        )
    )[2:]
    assert [row[0] for row in rows] == ["none", "iwp", "iwp, leaders 1", "iwp, leaders 1"]
    assert [row[1] for row in rows] == ["1", "1/64", "1/64", "1/33.3"]
    assert rows[0][2:] == ["0.9000", "0.500", "40.0", "20.0", "1.50"]
    assert rows[1][2] == "0.8700 ± 0.0100 (2)"


def test_table_names_unequal_replicas():
    bad = result(seed=1)
    bad["replicas_equal"] = False
    assert "Replicas differ: none." in table.table([result(), bad])


def test_table_command_with_plot(tmp_path, monkeypatch, capsys):
    for seed in range(2):
        write_run(tmp_path / "runs.jsonl" / str(seed), result("iwp", seed=seed, density=1 / 64))
    picture = tmp_path / "plots" / "accuracy.png"
    monkeypatch.setattr(sys, "argv", ["table.py", str(tmp_path / "runs.jsonl"), "--plot", str(picture)])
    table.main()
    assert capsys.readouterr().out.count("\n") == 3
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_an_older_result_has_the_options_it_ran_with():
    old = runs.complete({"compression": "iwp", "density": 0.5, "progress": None})
    then = {"dense_values": "fp32", "bucket_mb": 16.0, "block_means": False, "host": "horovod", "extrapolate": None}
    assert {**old, **then, "density": 0.5} == old and "progress" not in old
    assert runs.complete({"compression": "iwp", "no_block_means": False})["block_means"] is True
    assert runs.complete({"compression": "mipd", "whole_model": True})["layerwise"] is False
    before = {"extrapolate": None, "host": "horovod", "optimizer": "sgd", "context": 64, "ranks": None}
    names = ("local_steps", "unsent", "buffer_decay", "outer_lr", "outer_momentum", "fragments", "delay", "nodes")
    before |= dict.fromkeys((*names, "restore_length"))
    assert runs.complete({"compression": "none"}) == {"compression": "none", **before}
    local = runs.complete({"compression": "none", "local_steps": 4})
    assert (local["restore_length"], local["fragments"], local["delay"]) == (False, 1, 0)
