"""scripts/lab/bench_exchange.py: shapes, gradients, columns; and real runs, on the loopback and in a netlab."""

import json
import math
import signal
import subprocess
import sys
import time

import bench_exchange as bench
import pytest
import torch
from experiment.result_file import read_runs
from launch import ROOT, end, finish, needs_hosts, start

from hvd_compress.cli import shapes, synthetic

ROW = {"method", "step_ms", "alone_ms", "exchange_ms", "compress_ms", "tx_bytes", "wire_ratio", "wrong"}

# Shapes and gradients.


@pytest.mark.parametrize(
    "name, entries, tensors",
    [
        ("resnet50", 25_557_032, 161),
        ("gpt2", 124_439_808, 148),
    ],
)
def test_shapes_are_those_of_the_networks(name, entries, tensors):
    named = list(shapes.SHAPES[name]())
    assert sum(math.prod(shape) for _, shape in named) == entries
    assert len(named) == len({name for name, _ in named}) == tensors


def test_backward_hands_out_fresh_gradients_from_the_last_to_the_first():
    models = [synthetic.Synthetic(shapes.tiny(), rank) for rank in (0, 1)]
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


# Columns.


def result(*steps, alone=20.0, compress=4.0, sent=5e4, equal=True):
    measured = {"steps_ms": list(steps), "longest_ms": max(steps), "alone_ms": alone, "compress_ms": compress}
    return {
        **measured,
        "sent_bytes": sent,
        "ranks": 2,
        "entries": 1_000_000,
        "replicas_equal": equal,
        "environment": {"settings": {}},
    }


def test_runs_of_a_method_share_a_row():
    first, second = result(100.0, 200.0, 300.0), result(400.0, 600.0, 500.0, alone=30.0, sent=7e4, equal=False)
    row = bench.make_row("iwp", "1gbit", "mpi", [first, second])
    assert set(row) >= ROW and json.dumps(row)
    assert (row["step_ms"], row["step_ms_spread"], row["step_ms_runs"]) == (350, [100, 600], [200, 500])
    assert (row["alone_ms"], row["exchange_ms"], row["compress_ms"], row["steps"]) == (25, 325, 4, 6)
    # Two ranks: the ring sends every entry once.
    assert row["tx_bytes"] == 6e4 and row["dense_bytes"] == 4e6 and row["wire_ratio"] == pytest.approx(4e6 / 6e4)
    assert row["break_even_gbit_s"] == pytest.approx(8 * (4e6 - 6e4) / 0.004 / 1e9)
    assert row["wrong"] == 1


def test_break_even_is_where_compressing_takes_as_long_as_sending():
    assert bench.break_even(0.0, 1.0) is None and bench.break_even(1e8, 0.0) is None
    assert 8 * 1e8 / (bench.break_even(1e8, 80.0) * 1e9) == pytest.approx(0.08)


def test_methods_are_compared_at_the_same_rate_and_with_the_fastest():
    rows = [
        {"method": method, "rate": rate, "backend": backend, "step_ms": step}
        for method, rate, backend, step in (
            ("none", "a", "mpi", 100),
            ("none@slow", "a", "mpi", 90),
            ("none", "a", "gloo", 80),
            ("fp16", "a", "mpi", 60),
            ("fp16", "a", "gloo", 90),
            ("iwp", "a", "mpi", 20),
            ("none", "b", "mpi", 10),
            ("iwp", "b", "gloo", 20),
            ("ddp-none", "c", "gloo", 30),
            ("ddp-iwp", "c", "gloo", 10),
        )
    ]
    found = [(row["speedup_over_none"], row["speedup_over_fp16"]) for row in bench.compared(rows)]
    a = [(80 / step, 60 / step) for step in (100, 90, 80, 60, 90, 20)]
    assert found == [*a, (1, None), (0.5, None), (1, None), (3, None)]
    # What failed may have been the fastest.
    rows = bench.compared(rows, [("none@slow", "a")])
    assert [row["speedup_over_none"] for row in rows[5:8]] == [None, 1, 0.5] and rows[5]["speedup_over_fp16"] == 3


def test_ddp_runs_once_and_by_gloo_and_what_is_for_open_mpi_by_mpi():
    methods, setting = "--methods=none,none@sleep,ddp-iwp", "--environment=none@sleep:OMPI_MCA_mpi_yield_when_idle=0"
    args = bench.parse(["--hosts=2", "--rate=none,1gbit", "--backend=mpi,gloo", "--runs=2", methods, setting])
    found = [(rate, backend, variant.label) for rate, backend, variant in bench.runs(args)]
    once = [("mpi", "none"), ("mpi", "none@sleep"), ("gloo", "none"), ("gloo", "ddp-iwp")]
    assert found == [(rate, *run) for rate in ("none", "none", "1gbit", "1gbit") for run in once]


@pytest.mark.parametrize(
    "arguments, says",
    [
        ("--ranks 2 --rate 1gbit", "--rate needs --hosts"),
        ("--hosts 2 --rate fast", "got 'fast'"),
        ("--hosts 2 --methods none,zip", "unknown method 'zip'"),
        ("--ranks 2 --backend mpi,nccl", "--backend must be of mpi and gloo, got nccl"),
        ("--ranks 2 --backend mpi,mpi", "each only once"),
        ("--hosts 2 --rate none,1gbit,none", "each only once"),
        ("--hosts 2 --methods ddp-fp16,none,ddp-fp16", "each only once"),
        ("--ranks 1", "--ranks must be at least 2"),
        ("--hosts 2 --option qsgd", "expected METHOD:OPTIONS"),
        ("--hosts 2 --methods iwp --environment none:A=1", "expected METHOD:NAME=VALUE"),
        ("--hosts 2 --methods iwp --environment iwp:A", "expected METHOD:NAME=VALUE"),
        ("--shapes tiny", "one of the arguments --hosts --ranks is required"),
    ],
)
def test_a_wrong_argument_is_named(arguments, says, capsys):
    with pytest.raises(SystemExit):
        bench.parse(arguments.split())
    assert says in capsys.readouterr().err


# Real runs.


def begin(arguments):
    command = [sys.executable, bench.__file__, "--shapes", "tiny", "--steps", "3", "--timeout", "100"]
    return start([*command, *arguments.split()], PYTHONPATH=str(ROOT))


def run(arguments, timeout):
    process = begin(arguments)
    output = finish(process, timeout)
    if process.returncode == 2 and "no network namespaces here" in output:
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
        assert set(row) >= ROW and row["wrong"] == 0 and row["steps"] == 6
        low, high = row["step_ms_spread"]
        assert low <= row["step_ms"] <= high and row["step_ms"] > row["alone_ms"] > 0
    ratios = [row["wire_ratio"] for row in content["rows"]]
    assert ratios[:2] == pytest.approx([1, 2]) and 10 < ratios[2] < 30
    # Horovod looks at what is to do once in a cycle: two messages, one after the other, take one at least.
    assert content["rows"][3]["step_ms"] > 200
    assert [row["settings"].get("HOROVOD_CYCLE_TIME") for row in content["rows"]] == [None, None, None, "200"]
    assert all(f"| {method} (mpi) " in output for method in methods.split(","))


def hosts_of(process):
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return [line for line in listed.splitlines() if line.startswith(f"b{process.pid}host")]


def test_ddp_rows_on_the_loopback(tmp_path):
    path = tmp_path / "runs.jsonl" / "rows"
    run(f"--ranks 2 --methods ddp-powersgd,ddp-iwp --json {path}", timeout=240)
    powersgd, iwp = read_runs(path.parent)[path.name]["rows"]
    assert powersgd["wrong"] == iwp["wrong"] == 0 and powersgd["wire_ratio"] > 2 and iwp["wire_ratio"] > 30
    assert iwp["compress_ms"] > 0


@needs_hosts
def test_a_run_on_hosts_of_its_own(tmp_path):
    pytest.importorskip("horovod.torch", reason="Horovod is not installed")
    path = tmp_path / "runs.jsonl" / "rows"
    run(f"--hosts 2 --rate 1gbit --backend gloo --methods iwp,ddp-fp16 --json {path}", timeout=240)
    iwp, ddp = read_runs(path.parent)[path.name]["rows"]
    assert iwp["wrong"] == ddp["wrong"] == 0
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
    assert flat["wrong"] == nodes["wrong"] == 0 and flat["ranks"] == nodes["ranks"] == 4
    assert nodes["tx_bytes"] < 0.7 * flat["tx_bytes"]


@pytest.mark.slow
@needs_hosts
def test_an_interrupted_run_leaves_no_hosts_behind():
    process = begin("--hosts 2 --rate 1gbit --methods iwp --steps 100000 --max-seconds 1000")
    try:
        deadline = time.monotonic() + 30
        while len(hosts_of(process)) < 2 and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.1)
        if process.poll() == 2 and "network namespaces" in (said := "".join(map(str, process.communicate()))):
            pytest.skip(said.strip()[-200:])
        assert len(hosts_of(process)) == 2
        time.sleep(3)  # ranks are on their way
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)
        assert process.returncode == 143 and not hosts_of(process)
    finally:
        end(process)
