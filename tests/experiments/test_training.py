"""Trainings by train.py on every host."""

import os
from pathlib import Path

import pytest
import torch
import train
from experiment import hosts, quality
from experiment.result_file import read_runs
from launch import launch
from local_workers import CALL


def trained(launcher, arguments, path):
    launch("run.sh", [*launcher, "2", train.__file__, *SHORT, *arguments, "--json", str(path)], timeout=120)
    return read_runs(path.parent)[path.name]


TEXT = ["--data", "text", "--model", "gpt", "--optimizer", "adamw"]
SHORT = ["--data", "digits", "--model", "cnn", "--epochs", "1", "--max-steps", "4", "--limit-train", "256"]


def simulated(arguments, path):
    """The same with all ranks in this process."""
    threads = torch.get_num_threads()
    assert train.main(train.parse([*SHORT, "--host", "threads", "--ranks", "2", *arguments, "--json", str(path)])) == 0
    torch.set_num_threads(threads)
    return read_runs(path.parent)[path.name]


@pytest.mark.parametrize("method", ["none", "iwp"])
def test_a_language_model_learns_with_adamw(method, tmp_path):
    given = [*TEXT, "--compression", method, "--limit-train", "9999"]
    given += ["--max-steps", "12", "--eval-every", "0.06", "--lr-warmup-epochs", "0", "--batch-size", "4"]
    found = simulated(given, tmp_path / "runs.jsonl" / "result")
    tests = [entry["test_bits_per_byte"] for entry in found["history"]]
    assert len(tests) == 2 and 8 > tests[0] > tests[1] == found["test_bits_per_byte"]
    assert found["replicas_equal"] and found["ranks"] == 2 and "test_accuracy" not in found
    assert found["wire_ratio"] == 1 if method == "none" else found["wire_ratio"] > 20


def test_simulated_nodes_work_on_two_levels(tmp_path, capsys):
    """Of four ranks; a node's card sends what its two ranks send."""
    given = ["--compression", "topk", "--ranks", "4", "--min-numel", "1"]
    flat = simulated(given, tmp_path / "runs.jsonl" / "flat")
    nodes = simulated([*given, "--nodes", "2"], tmp_path / "runs.jsonl" / "nodes")
    assert flat["replicas_equal"] and nodes["replicas_equal"] and nodes["ranks"] == 4
    assert nodes["node_bytes_per_step"] == pytest.approx(2 * nodes["wire_bytes_per_step"])
    assert flat["node_bytes_per_step"] == flat["wire_bytes_per_step"] > 2 * nodes["node_bytes_per_step"]
    for wrong, says in (("--nodes=3", "divisor of --ranks 4"), ("--local-steps=2", "is a rank with its batches")):
        with pytest.raises(SystemExit):
            train.parse([*SHORT, "--host", "threads", *given, "--nodes", "2", wrong])
        assert says in capsys.readouterr().err


def test_a_rank_that_cannot_start_ends_a_simulation(tmp_path, capsys):
    given = ["--host", "threads", "--ranks", "3", "--data", "cifar10", "--data-dir", str(tmp_path)]
    assert train.main(train.parse(given)) == 2
    assert "rank 2: no CIFAR-10 at" in capsys.readouterr().err


slow = pytest.mark.slow


@pytest.mark.parametrize(
    "method", [pytest.param("none", marks=slow), pytest.param("fp16", marks=slow), "iwp", "ddp-powersgd"]
)
def test_ddp_trains_without_horovod(method, tmp_path, monkeypatch):
    (tmp_path / "horovod").mkdir()
    (tmp_path / "horovod" / "__init__.py").write_text("raise ImportError('Horovod is not installed')")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    found = trained(["--ddp"], ["--host", "ddp", "--compression", method], tmp_path / "runs.jsonl" / "result")
    assert found["replicas_equal"] and found["steps"] == 4 and found["config"]["host"] == "ddp"
    if method != "ddp-powersgd":  # with two ranks there is one order to sum in
        alike = simulated(["--compression", method], tmp_path / "runs.jsonl" / "simulated")
        for key in ("train_loss", "test_accuracy", "wire_bytes_per_step"):
            assert alike[key] == found[key], key
    assert found["wire_ratio"] == pytest.approx({"none": 1, "fp16": 2}.get(method, found["wire_ratio"]))
    assert found["wire_ratio"] > (1.5 if method != "none" else 0.9)


def test_fsdp_trains_as_simulated_nodes_do(tmp_path):
    """Two nodes of two ranks. FSDP's own averages, a compressor's at density 1 and those of local steps with a period
    of 1 are exact. DeMo's blocks are of shards in place of whole matrices: about the same."""
    text = "--data text --model gpt --limit-train 9999 --epochs 1 --max-steps 4 --eval-every 0.02 --lr-warmup-epochs 0"
    trainings = {
        "none": "--optimizer plain --lr 0.1",
        "iwp": "--compression iwp --density 1 --values fp32 --optimizer adamw",
        "local": "--compression none --local-steps 1 --optimizer plain --lr 0.1",
        "demo": "--compression demo --density 1/12",
    }
    path = tmp_path / "runs.jsonl"
    fsdp = [f"{text} --batch-size 4 {given} --json {path / name}" for name, given in trainings.items()]
    script = str(Path(__file__).with_name("fsdp_trainings.py"))
    launch("run.sh", ["--ddp", "4", script, *(f"--host fsdp --nodes 2 {given}" for given in fsdp)], timeout=480)
    found = read_runs(path)
    for name, given in trainings.items():
        sparse = name == "demo"
        arguments = f"{text} --batch-size 4 --ranks 4 {given} {'--nodes 2' if sparse else ''}"
        alike, ours = simulated(arguments.split(), tmp_path / "simulated.jsonl" / name), found[name]
        assert ours["replicas_equal"] and ours["ranks"] == 4 and ours["parameters"] == alike["parameters"]
        losses, expected = ([entry["train_loss"] for entry in run["history"]] for run in (ours, alike))
        assert losses == pytest.approx(expected, rel=5e-3 if sparse else 1e-4), name
        expected = alike["test_bits_per_byte"]
        assert ours["test_bits_per_byte"] == pytest.approx(expected, rel=2e-2 if sparse else 1e-4), name
        # A dense node's card sends 2 (n - 1) / n times four bytes of each entry.
        expected = alike["node_bytes_per_step"] if sparse else 4 * ours["parameters"]
        assert ours["node_bytes_per_step"] == pytest.approx(expected, rel=0.05), name


@pytest.mark.slow
@pytest.mark.parametrize("given", ["none", "iwp", "qsgd --optimizer muon"])
def test_both_hosts_train_alike(given, tmp_path):
    pytest.importorskip("horovod.torch", reason="Horovod is not installed")
    given = ["--compression", *given.split()]
    ddp = trained(["--ddp"], ["--host", "ddp", *given], tmp_path / "runs.jsonl" / "ddp")
    horovod = trained([], given, tmp_path / "runs.jsonl" / "horovod")
    assert ddp["train_loss"] == pytest.approx(horovod["train_loss"], rel=1e-5)
    assert ddp["wire_bytes_per_step"] == pytest.approx(horovod["wire_bytes_per_step"], rel=1e-3)
    threads = simulated(given, tmp_path / "runs.jsonl" / "threads")
    for key in ("train_loss", "test_accuracy", "wire_bytes_per_step"):
        assert threads[key] == horovod[key], key


# Local steps.


@pytest.mark.parametrize(
    "given",
    [
        "--compression none",
        "--compression iwp --density 1/4",
        "--compression iwp --density 1/4 --unsent buffer --buffer-decay 0.95 --outer-lr 0.9 --outer-momentum 0.5",
    ],
)
def test_tests_between_exchanges_neither_change_nor_count(given, tmp_path):
    given = [*given.split(), "--local-steps", "4", "--optimizer", "adamw", "--epochs", "4", "--max-steps", "14"]
    once = simulated([*given, "--eval-every", "99"], tmp_path / "runs.jsonl" / "once")
    often = simulated([*given, "--eval-every", "1.25"], tmp_path / "runs.jsonl" / "often")
    tests = [entry["step"] for entry in often["history"] if entry["test_accuracy"] is not None]
    assert tests == [5, 10, 14]
    for key in ("test_accuracy", "train_loss", "wire_bytes_per_step", "residual_norm"):
        assert often[key] == once[key], key
    assert once["replicas_equal"] and once["history"][-1]["wire_bytes"] == 12 * once["wire_bytes_per_step"]
    assert once["dense_bytes_per_step"] == 4 * once["parameters"]  # 2 (N - 1) / N times four bytes
    calls = 4 * once["parameters"] / (once["parameters"] + CALL / 4)  # in each period
    assert once["wire_ratio"] == pytest.approx(calls, rel=1e-9) if "none" in given else once["wire_ratio"] > 40


def test_weights_are_averaged_for_a_test_only():
    def body(host):
        model = torch.nn.BatchNorm1d(3)
        torch.nn.init.constant_(model.weight, 0.1 * host.rank)
        own = model.weight.detach().clone()
        with quality.averaged_weights(model, host):
            torch.testing.assert_close(model.weight.detach(), torch.full((3,), 0.1))
        return 0 if torch.equal(model.weight, own) else 1

    assert hosts.run("threads", body, ranks=3) == 0


@pytest.mark.parametrize("launcher", [pytest.param(["--ddp"], marks=slow), []], ids=["ddp", "mpi"])
def test_local_steps_on_real_ranks_lower_the_loss_as_simulated_ones_do(launcher, tmp_path):
    if not launcher:
        pytest.importorskip("horovod.torch", reason="Horovod is not installed")
    given = ["--compression", "iwp", "--density", "1/4", "--local-steps", "2", "--optimizer", "adamw"]
    given += ["--epochs", "4", "--max-steps", "16", "--lr-warmup-epochs", "0"]
    host = ["--host", "ddp"] if launcher else []
    found = trained(launcher, [*given, *host], tmp_path / "runs.jsonl" / "result")
    alike = simulated(given, tmp_path / "runs.jsonl" / "simulated")
    for key in ("train_loss", "test_accuracy"):
        assert alike[key] == found[key], key
    # Simulated sums are made of equal parts, as Gloo's, and padded; Horovod's are not.
    assert 0 <= alike["wire_bytes_per_step"] - found["wire_bytes_per_step"] <= 16
    losses = [entry["train_loss"] for entry in found["history"]]
    assert found["replicas_equal"] and len(losses) == 4 and losses[-1] < 0.9 * losses[0]
    assert found["wire_ratio"] > 2 * 8
