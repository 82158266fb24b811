"""hvd-compress bench: a real launch on this machine, its rows, and wrong arguments."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import formulas
import pytest
import torch

pytest.importorskip("typer", reason="the extra [cli] is not installed")

from tiny_model import TINY, TINY_SHAPES
from typer.testing import CliRunner

from hvd_compress import recipes
from hvd_compress.carriers.mirror import Mirror
from hvd_compress.cli import bench, launchers, methods, shapes, synthetic
from hvd_compress.cli.app import app
from hvd_compress.engine.collectives import ring_bytes


def run(*arguments):
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, ["bench", *arguments])


def test_a_real_call(tmp_path):
    """What is measured by default: what docs/choosing.md advises, between the baselines."""
    file = tmp_path / "json" / "out.json"
    done = run("--model", TINY, "--steps", "3", "--json", str(file))
    assert done.exit_code == 0, done.output
    content = json.loads(file.read_text())
    assert [row["method"] for row in content["rows"]] == ["dense", "fp16", "low_bit", "DeMo", "IWP"]
    best = min(row["step_ms"] for row in content["rows"][:2])
    for row in content["rows"]:
        low, high = row["step_ms_spread"]
        assert low <= row["step_ms"] <= high and row["step_ms"] > 0 and row["replicas_equal"] and row["ranks"] == 2
        assert row["speedup"] == pytest.approx(best / row["step_ms"])
        # What was counted is what the formula says; a look at the weights before an exchange of local steps is in it.
        want = formulas.sent_by(row["method"], TINY_SHAPES, 2) / methods.METHODS[row["method"]].local_steps
        assert row["sent_bytes"] == pytest.approx(want, rel=0.01)


def test_low_bit_is_the_recipe():
    model = torch.nn.Linear(64, 64)
    local = recipes.low_bit(model, torch.optim.SGD(model.parameters(), lr=0.1), collectives=Mirror(2))
    built = methods.METHODS["low_bit"].build(torch.nn.Linear(64, 64), collectives=Mirror(2))
    assert type(built) is type(local.compression) and built.options() == local.compression.options()
    assert methods.METHODS["low_bit"].local_steps == local.period


# Rows, which scripts/lab/bench_exchange.py prints too.


def measured(*steps, alone=20.0, compress=4.0, sent=5e4, equal=True):
    ranks = {"ranks": 2, "entries": 1_000_000, "inside_bytes": 0.0, "replicas_equal": equal, "sent_bytes": sent}
    return {"steps_ms": list(steps), "longest_ms": max(steps), "alone_ms": alone, "compress_ms": compress, **ranks}


def test_runs_of_a_method_share_a_row():
    first, second = measured(100.0, 200.0, 300.0), measured(400.0, 600.0, 500.0, alone=30.0, sent=7e4, equal=False)
    row = bench.summary([first, second])
    assert (row["step_ms"], row["step_ms_spread"], row["step_ms_runs"]) == (350, [100, 600], [200, 500])
    assert (row["alone_ms"], row["exchange_ms"], row["compress_ms"], row["steps"]) == (25, 325, 4, 6)
    # Two ranks: the ring sends every entry once.
    assert row["sent_bytes"] == 6e4 and row["wire_ratio"] == pytest.approx(4e6 / 6e4)
    assert row["break_even_gbit_s"] == pytest.approx(8 * (4e6 - 6e4) / 0.004 / 1e9)
    assert not row["replicas_equal"]
    assert bench.break_even(0.0, 1.0) is None and bench.break_even(1e8, 0.0) is None


def test_speed_up_is_over_the_fastest_baseline():
    rows = [{"method": name, "step_ms": ms} for name, ms in (("dense", 100), ("fp16", 60), ("fp16", 80), ("IWP", 20))]
    assert [row["speedup"] for row in bench.compared(rows)] == [0.6, 1, 0.75, 3]
    assert bench.compared(rows[1:])[-1]["speedup"] is None


def test_backward_hands_out_fresh_gradients_from_the_last_to_the_first():
    models = [synthetic.Synthetic(shapes.named(TINY), rank) for rank in (0, 1)]
    parameters, order = list(models[0].parameters()), []
    for number, parameter in enumerate(parameters):
        parameter.register_post_accumulate_grad_hook(lambda _, number=number: order.append(number))
    noise, seen = models[0].noise.clone(), []
    for _ in range(3):
        models[0]().backward()
        assert all(torch.equal(p.grad, g) for p, g in zip(parameters, models[0].prepared, strict=True))
        assert order == list(reversed(range(len(parameters))))
        seen.append(parameters[0].grad.clone())
        for parameter in parameters:  # as a compressor does; the noise must not feel it
            parameter.grad.zero_()
            parameter.grad = None
        order.clear()
    assert torch.equal(models[0].noise, noise)
    assert not torch.equal(seen[0], seen[1]) and not torch.equal(models[0].noise, models[1].noise)
    assert all(torch.equal(a, b) for a, b in zip(parameters, models[1].parameters(), strict=True))


def test_two_nodes(tmp_path):
    """Sent are the bytes of a node's link."""
    file = tmp_path / "out.json"
    given = ["--ranks", "4", "--ranks-per-node", "2", "--model", TINY, "--methods", "dense;DeMo", "--steps", "2"]
    done = run(*given, "--json", str(file))
    assert done.exit_code == 0, done.output
    dense, demo = json.loads(file.read_text())["rows"]
    assert dense["replicas_equal"] and demo["replicas_equal"]
    assert dense["sent_bytes"] == formulas.sent_by("dense", TINY_SHAPES, 4) and not dense["inside_bytes"]
    # Between two nodes, but uncompressed tensors in a ring of all ranks, which leaves a node once.
    small = 4 * sum(math.prod(shape) for shape in TINY_SHAPES if not methods.is_compressed(shape))
    in_ring = ring_bytes("allreduce", small, 4) - ring_bytes("allreduce", small, 2)
    demo_between = formulas.sent_by("DeMo", TINY_SHAPES, 2)
    assert demo["sent_bytes"] == pytest.approx(demo_between + in_ring, rel=0.02)
    assert demo["inside_bytes"] > 0.9 * (4 * sum(map(math.prod, TINY_SHAPES)) - small)


def test_a_launch_that_fails_says_why(monkeypatch):
    def failing(ranks, *module):
        return [sys.executable, "-c", "raise SystemExit('no such partition')"], {}

    monkeypatch.setitem(bench.LAUNCHERS, "torchrun", ("ddp", failing))
    done = run("--model", TINY)
    assert done.exit_code == 1 and "no such partition" in done.output


def test_a_launcher_that_ends_without_ranks_is_a_failure(monkeypatch):
    monkeypatch.setitem(bench.LAUNCHERS, "torchrun", ("ddp", lambda *_: (["true"], {})))
    done = run("--model", TINY)
    assert done.exit_code == 1 and "results of 0 of 5 methods" in done.output


@pytest.mark.skipif(not launchers.program("mpirun"), reason="Open MPI is not installed")
def test_horovods_ranks():
    pytest.importorskip("horovod.torch", reason="Horovod is not installed")
    done = run("--model", TINY, "--methods", "dense;IWP", "--steps", "3", "--launcher", "mpirun")
    assert done.exit_code == 0, done.output
    assert "2 ranks of horovod by mpirun" in done.output


def running(text):
    """Processes, other than zombies, whose arguments contain a text."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if text in (folder / "cmdline").read_text(errors="replace"):
                found.append(folder.name)
        except (FileNotFoundError, ProcessLookupError):  # it has ended
            continue
    return found


@pytest.mark.parametrize("numbers", [[signal.SIGINT], [signal.SIGTERM, signal.SIGINT]])
def test_a_signal_ends_the_ranks_and_removes_the_folder(default_signals, tmp_path, numbers):
    """Each signal alone, without ranks: test_processes.py."""
    command = [sys.executable, "-m", "hvd_compress", "bench", "--model", TINY, "--steps", "1000000"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        end = time.monotonic() + 100
        while len(running(f"--result={tmp_path}")) < 3 and time.monotonic() < end:  # torchrun and two ranks
            time.sleep(0.1)
        assert len(running(f"--result={tmp_path}")) >= 3
        for number in numbers:
            process.send_signal(number)
            time.sleep(0.3)  # the second one arrives while the ranks are ended
        # Ctrl-C: 1 or 130, by the version of typer.
        assert process.wait(60) in ((1, 130) if numbers[0] == signal.SIGINT else (128 + numbers[0],))
    finally:
        process.kill()
    assert not running(f"--result={tmp_path}") and not list(tmp_path.glob("hvd-compress.*"))


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["--methods", "dense;zip"], "unknown method 'zip'"),
        (["--model", "x"], "PATH.py:FUNCTION"),
        (["--methods", "low_bit", "--ranks", "4", "--ranks-per-node", "2"], "low_bit is measured with"),
    ],
)
def test_a_wrong_argument_is_named(arguments, says):
    done = run(*arguments)
    assert done.exit_code == 2 and says in done.output
