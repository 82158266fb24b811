"""scripts/lab/bench_exchange.py: arguments; and real runs, on the loopback and in a netlab. Rows: tests/cli."""

import signal
import subprocess
import sys
import time

import bench_exchange as bench
import pytest
import torch
from experiment.result_file import read_runs
from launch import ROOT, end, finish, needs_hosts, start


@pytest.mark.parametrize(
    "arguments, says",
    [
        ("--ranks 2 --rate 1gbit", "--rate and --delay-ms need --hosts"),
        ("--ranks 2 --delay-ms 5", "--rate and --delay-ms need --hosts"),
        ("--hosts 2 --rate fast", "got 'fast'"),
        ("--hosts 2 --methods none,zip", "unknown method 'zip'"),
        ("--hosts 2 --rate none,1gbit,none", "each only once"),
        ("--ranks 1", "--ranks must be at least 2"),
        ("--hosts 2 --option qsgd", "expected METHOD:OPTIONS"),
        ("--hosts 2 --methods iwp --environment iwp:A", "expected METHOD:NAME=VALUE"),
        ("--shapes tiny", "one of the arguments --hosts --ranks is required"),
    ],
)
def test_a_wrong_argument_is_named(arguments, says, capsys):
    with pytest.raises(SystemExit):
        bench.parse(arguments.split())
    assert says in capsys.readouterr().err


def test_a_variant_of_a_baseline_is_one():
    assert [bench.method_of(label) for label in ("ddp-fp16", "none@slow", "ddp-iwp@8")] == ["fp16", "none", "iwp"]


# Real runs.


def begin(arguments):
    command = [sys.executable, bench.__file__, "--shapes", "tiny", "--steps", "3", "--timeout", "100"]
    return start([*command, *arguments.split()], PYTHONPATH=str(ROOT))


def run(arguments, timeout):
    process = begin(arguments)
    output = finish(process, timeout)
    if process.returncode == 1 and "no network namespaces here" in output:
        pytest.skip(output.strip()[-200:])
    assert process.returncode == 0, output[-3000:]
    return output


@pytest.mark.slow
def test_a_run_on_the_loopback(tmp_path):
    pytest.importorskip("horovod.torch", reason="Horovod is not installed")
    path = tmp_path / "out" / "runs.jsonl" / "rows"
    methods = "none,fp16,iwp@8,iwp@slow"
    more = f"--option iwp@8:--density=1/8 --environment iwp@slow:HOROVOD_CYCLE_TIME=200 --json {path}"
    output = run(f"--ranks 2 --methods {methods} --runs 2 {more}", timeout=240)
    content = read_runs(path.parent)[path.name]
    assert set(content) == {"name", "config", "rows"}
    assert content["config"]["shapes"] == "tiny" and content["config"]["torch"] == torch.__version__
    assert [row["method"] for row in content["rows"]] == methods.split(",")
    for row in content["rows"]:
        assert row["replicas_equal"] and row["steps"] == 6
        low, high = row["step_ms_spread"]
        assert low <= row["step_ms"] <= high and row["step_ms"] > row["alone_ms"] > 0
    ratios = [row["wire_ratio"] for row in content["rows"]]
    assert ratios[:2] == pytest.approx([1, 2]) and 10 < ratios[2] < 30
    # Horovod looks at what is to do once in a cycle: two messages, one after the other, take one at least.
    assert content["rows"][3]["step_ms"] > 200
    assert [row["settings"].get("HOROVOD_CYCLE_TIME") for row in content["rows"]] == [None, None, None, "200"]
    best = min(row["step_ms"] for row in content["rows"][:2])
    assert [row["speedup"] for row in content["rows"]] == pytest.approx([best / r["step_ms"] for r in content["rows"]])
    assert all(f"| {method} " in output for method in methods.split(","))


def hosts_of(process):
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return [line for line in listed.splitlines() if line.startswith(f"b{process.pid}host")]


def test_ddp_rows_on_the_loopback(tmp_path):
    path = tmp_path / "runs.jsonl" / "rows"
    run(f"--ranks 2 --methods ddp-powersgd,ddp-iwp --json {path}", timeout=240)
    powersgd, iwp = read_runs(path.parent)[path.name]["rows"]
    assert powersgd["replicas_equal"] and powersgd["wire_ratio"] > 2
    assert iwp["replicas_equal"] and iwp["wire_ratio"] > 30
    assert iwp["compress_ms"] > 0


@needs_hosts
def test_a_run_on_hosts_of_its_own(tmp_path):
    pytest.importorskip("horovod.torch", reason="Horovod is not installed")
    path = tmp_path / "runs.jsonl" / "rows"
    run(f"--hosts 2 --rate 1gbit --methods iwp,ddp-fp16 --json {path}", timeout=240)
    iwp, ddp = read_runs(path.parent)[path.name]["rows"]
    assert iwp["replicas_equal"] and ddp["replicas_equal"]
    # The counter includes negotiation and barriers: little of 0.3 MB, more of 12 kB.
    assert 1.7 < ddp["wire_ratio"] <= 2 and 10 < iwp["wire_ratio"] < 60


@needs_hosts
def test_hosts_of_several_ranks(tmp_path):
    """TopK gathers: a host of two ranks that work on two levels sends less than half."""
    path = tmp_path / "runs.jsonl" / "rows"
    given = "--methods ddp-topk,ddp-topk@nodes --option ddp-topk@nodes:--nodes=2 --option ddp-topk:--density=1/64"
    given += " --option ddp-topk@nodes:--density=1/64"
    run(f"--hosts 2 --ranks-per-node 2 --rate 1gbit {given} --json {path}", timeout=240)
    flat, nodes = read_runs(path.parent)[path.name]["rows"]
    assert flat["replicas_equal"] and nodes["replicas_equal"]
    assert flat["ranks"] == nodes["ranks"] == 4
    assert nodes["sent_bytes"] < 0.7 * flat["sent_bytes"]


@pytest.mark.slow
@needs_hosts
def test_an_interrupted_run_leaves_no_hosts_behind():
    process = begin("--hosts 2 --rate 1gbit --methods iwp --steps 100000 --max-seconds 1000")
    try:
        deadline = time.monotonic() + 30
        while len(hosts_of(process)) < 2 and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.1)
        if process.poll() == 1 and "network namespaces" in (said := "".join(map(str, process.communicate()))):
            pytest.skip(said.strip()[-200:])
        assert len(hosts_of(process)) == 2
        time.sleep(3)  # ranks are on their way
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)
        assert process.returncode == 143 and not hosts_of(process)
    finally:
        end(process)
