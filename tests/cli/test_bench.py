"""hvd-compress bench: a real launch on this machine, its rows, and wrong arguments."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("typer", reason="the extra [cli] is not installed")

from typer.testing import CliRunner

from hvd_compress.cli import bench, launchers, ranks, shapes, wire
from hvd_compress.cli.app import app


def run(*arguments):
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, ["bench", *arguments])


def test_a_real_call(tmp_path):
    pytest.importorskip("matplotlib")
    files = tmp_path / "json" / "out.json", tmp_path / "plot" / "out.png"
    methods = "dense;fp16;IWP;DeMo;TopK"
    done = run(
        "--model", "tiny", "--methods", methods, "--steps", "3", "--json", str(files[0]), "--plot", str(files[1])
    )
    assert done.exit_code == 0, done.output
    content = json.loads(files[0].read_text())
    assert content["ranks"] == 2 and [row["method"] for row in content["rows"]] == methods.split(";")
    sizes = [shape for _, shape in shapes.named("tiny")]
    for row in content["rows"]:
        low, high = row["step_ms_spread"]
        assert low <= row["step_ms"] <= high and row["step_ms"] > 0 < row["processor_ms"] and row["replicas_equal"]
        density = wire.METHODS[row["method"]].density
        # What was counted is what the formula says.
        assert row["sent_bytes"] == pytest.approx(
            wire.sent(wire.messages(row["method"], sizes, density, 2), 2), rel=1e-3
        )
    best = min(row["step_ms"] for row in content["rows"][:2])
    assert [row["speedup"] for row in content["rows"]] == pytest.approx([best / r["step_ms"] for r in content["rows"]])
    assert files[1].read_bytes()[:4] == b"\x89PNG"


def test_two_nodes(tmp_path):
    """Sent are the bytes of a node's link."""
    file = tmp_path / "out.json"
    given = ["--ranks", "4", "--ranks-per-node", "2", "--model", "tiny", "--methods", "dense;DeMo", "--steps", "2"]
    done = run(*given, "--json", str(file))
    assert done.exit_code == 0, done.output
    sizes = [shape for _, shape in shapes.named("tiny")]
    dense, demo = json.loads(file.read_text())["rows"]
    assert dense["replicas_equal"] and demo["replicas_equal"]
    assert dense["sent_bytes"] == wire.sent(wire.messages("dense", sizes, None, 4), 4) and not dense["inside_bytes"]
    # What is not compressed is summed in a ring of all ranks, which crosses each link once.
    rest = 4 * sum(math.prod(shape) for shape in sizes if not wire.is_compressed(shape))
    more = rest * (2 * 3 / 4 - 2 * 1 / 2)
    assert demo["sent_bytes"] == pytest.approx(wire.sent(wire.messages("DeMo", sizes, 1 / 16, 2), 2) + more, rel=0.02)
    assert demo["inside_bytes"] > 4 * sum(math.prod(shape) for shape in sizes if wire.is_compressed(shape)) * 0.9


def test_a_launch_that_fails_says_why():
    done = run("--model", "tiny", "--launcher", f"{sys.executable} -c 'raise SystemExit(\"no such partition\")'")
    assert done.exit_code == 1 and "no such partition" in done.output


def test_a_launcher_that_ends_without_ranks_is_a_failure():
    done = run("--model", "tiny", "--launcher", "true")
    assert done.exit_code == 1 and "results of 0 of 5 methods" in done.output


@pytest.mark.skipif(not launchers.program("mpirun"), reason="Open MPI is not installed")
def test_ddp_ranks_of_a_plain_mpirun(monkeypatch):
    """Open MPI sets ranks by other names than torchrun, and no address to meet at. The variables of a torchrun around
    the whole do not reach the ranks."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}.items():
        monkeypatch.setenv(name, value)
    for name in ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"):
        monkeypatch.setenv(name, "1")
    mpirun = f"{launchers.program('mpirun')} --oversubscribe --bind-to none -n 2 {sys.executable}"
    done = run("--model", "tiny", "--methods", "dense;IWP", "--steps", "3", "--launcher", mpirun)
    assert done.exit_code == 0, done.output
    assert "2 ranks of ddp" in done.output


def test_a_rank_is_found_by_any_launchers_variables(monkeypatch):
    for name in (name for pair in ranks.VARIABLES for name in pair):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(RuntimeError, match="does not number its ranks"):
        ranks._rank_and_size()
    for number, (rank, size) in enumerate(reversed(ranks.VARIABLES)):
        monkeypatch.setenv(rank, str(number))
        monkeypatch.setenv(size, "8")
        assert ranks._rank_and_size() == (number, 8)


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


@pytest.mark.parametrize(
    "numbers",
    [
        *(pytest.param([number], marks=pytest.mark.slow) for number in (signal.SIGTERM, signal.SIGHUP)),
        [signal.SIGINT],
        [signal.SIGTERM, signal.SIGINT],
    ],
)
def test_a_signal_ends_the_ranks_and_removes_the_folder(default_signals, tmp_path, numbers):
    """Each signal alone, without ranks: test_processes.py."""
    command = [sys.executable, "-m", "hvd_compress", "bench", "--model", "tiny", "--steps", "1000000"]
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
        (["--hosts", "a:1,b:1"], "--hosts is for --launcher mpirun"),
        (["--model", "x"], "PATH.py:FUNCTION"),
    ],
)
def test_a_wrong_argument_is_named(arguments, says):
    done = run(*arguments)
    assert done.exit_code == 2 and says in done.output


def test_other_hosts_get_the_environment():
    command, environment = launchers.mpirun(4, "a.module", hosts="a:2,b:2")
    assert command[command.index("-H") + 1] == "a:2,b:2" and "--oversubscribe" not in command
    exported = [command[i + 1] for i, part in enumerate(command) if part == "-x"]
    assert exported == [*environment, "PYTHONPATH"] and command[-2:] == ["-m", "a.module"]
    assert "-x" not in launchers.mpirun(2, "a.module")[0]


def test_the_users_own_launcher():
    command, _ = bench._command("srun -n 8 python", 2, "", "a.module", "--x=1")
    assert command == ["srun", "-n", "8", "python", "-m", "a.module", "--x=1"]
