"""hvd-compress estimate: shapes, the model of a step, its verdict, and a real call."""

import json
import math
import sys
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

pytest.importorskip("typer", reason="the extra [cli] is not installed")

import formulas
from tiny_model import TINY, TINY_SHAPES
from typer.testing import CliRunner

from hvd_compress import IWP, LocalSteps
from hvd_compress._version import __version__
from hvd_compress.carriers.mirror import Mirror
from hvd_compress.carriers.threads import ThreadWorld
from hvd_compress.cli import bench, doctor, estimate, kernels, methods, network, shapes
from hvd_compress.cli.app import app

MODEL = estimate.Model([shape for _, shape in shapes.resnet50()], 0.1)
SECONDS = {"dense": 0.0, "fp16": 0.01, "IWP": 0.05, "DeMo": 0.08, "low_bit": 0.06}


def on(bits, **more):
    return network.Network(bits, 0.0, **more)


def measured(method, seconds, ranks=4):
    """As if its compressor had been measured."""
    sends = formulas.messages(method, MODEL.shapes, ranks)
    trips = 2 * (ranks - 1) if method in methods.BASELINES else methods.METHODS[method].trips
    return kernels.Measured(seconds, formulas.sent(sends, ranks), trips)


@pytest.mark.parametrize("name, entries, tensors", [("resnet50", 25_557_032, 161), ("gpt2", 124_439_808, 148)])
def test_shapes_are_those_of_the_networks(name, entries, tensors):
    named = shapes.named(name)
    assert sum(math.prod(shape) for _, shape in named) == entries
    assert len(named) == len({name for name, _ in named}) == tensors


def test_a_model_of_the_users_own(tmp_path):
    file = tmp_path / "own.py"
    file.write_text("import torch\ndef net():\n    return torch.nn.Linear(7, 5)\ndef no():\n    return 3\n")
    assert shapes.named(f"{file}:net") == [("weight", (5, 7)), ("bias", (5,))]
    for model, says in (
        (f"{file}:no", "returns int"),
        (f"{file}:other", "no function other"),
        (f"{tmp_path}/missing.py:net", "no such file"),
        ("resnet51", "PATH.py:FUNCTION"),
    ):
        with pytest.raises(ValueError, match=says):
            shapes.named(model)


def test_a_model_file_imports_its_neighbours(tmp_path):
    (tmp_path / "neighbour_of_own.py").write_text("import torch\nNet = torch.nn.Linear\n")
    file = tmp_path / "own.py"
    file.write_text("from neighbour_of_own import Net\ndef net():\n    import neighbour_of_own\n    return Net(7, 5)\n")
    before = list(sys.path)
    assert shapes.named(f"{file}:net") == [("weight", (5, 7)), ("bias", (5,))]
    assert sys.path == before


@pytest.mark.parametrize(
    "text, says",
    [
        ("import torch\ndef net():\n    return torch.nn.Linear(7)\n", ":3: the model cannot be built: TypeError: "),
        ("def net(size):\n    return size\n", "the model cannot be built: TypeError: net() missing"),
        ("def net(:\n", "the model cannot be built: SyntaxError"),
        ("raise SystemExit('usage')\n", ":1: the model cannot be built: SystemExit: usage"),
        ("import torch\nnet = torch.nn.ReLU\n", "has no trainable parameters"),
    ],
)
@pytest.mark.parametrize("command", [["bench"], ["estimate", "--ranks", "2", "--bandwidth", "1gbit"]])
def test_an_error_in_the_users_file_names_it(tmp_path, command, text, says):
    file = tmp_path / "own.py"
    file.write_text(text)
    done = CliRunner(env={"COLUMNS": "400"}).invoke(app, [*command, "--model", f"{file}:net"])
    assert done.exit_code == 2 and str(file) in done.output and says in done.output and "Traceback" not in done.output


def test_a_sample_stands_for_the_whole_model():
    for sizes in (*([shape for _, shape in shapes.named(model)] for model in ("resnet50", "gpt2")), TINY_SHAPES):
        chosen, factor = kernels.sample(sizes)
        whole = sum(math.prod(shape) for shape in sizes if methods.is_compressed(shape))
        assert factor * sum(map(math.prod, chosen)) == pytest.approx(whole)
        assert sum(map(math.prod, chosen)) < 2 * kernels.MOST


def test_texts():
    assert network.bandwidth("2.5gbit") == 2.5e9 and network.bandwidth("none") == math.inf
    assert network.duration("50ms") == pytest.approx(5e-2)
    for text in ("fast", "1..2gbit", "0mbit", "gbit"):
        with pytest.raises(ValueError, match="a bandwidth is"):
            network.bandwidth(text)
    with pytest.raises(ValueError, match="a duration is"):
        network.duration("50")


def found_on(net, optimizer="sgd", seconds=SECONDS, model=MODEL, ranks=4, **options):
    """``ranks``: members of the exchange; dense and fp16 are in one ring of all ranks."""
    figures = {
        method: measured(method, taken, ranks * net.per_node if method in methods.BASELINES else ranks)
        for method, taken in seconds.items()
    }
    return {one.method: one for one in estimate.estimates(model, net, figures, optimizer, **options)}


def test_a_slow_link_takes_the_time_of_its_bytes_and_a_fast_one_none():
    dense = found_on(on(1e8))["dense"]
    # 2 (N - 1) / N times 4 bytes an entry.
    assert dense.bytes == pytest.approx(1.5 * 4 * 25_557_032)
    whole = 8 * dense.bytes / (1e8 * network.PAYLOAD)
    assert whole < dense.step < whole + 0.1
    for one in found_on(on(math.inf)).values():
        assert one.step == pytest.approx(0.1 + SECONDS[one.method] / methods.METHODS[one.method].local_steps)


def test_on_two_levels_a_host_sends_what_one_of_as_many_ranks_as_hosts_sends():
    """A ring of all ranks crosses each link once; inside, gradients are summed and averages sent."""
    flat, nodes = found_on(on(1e8), ranks=8), on(1e8, per_node=4, inside_bits=1e11)
    found = found_on(nodes, ranks=2)
    assert found["dense"].bytes == flat["dense"].bytes and found["dense"].step == flat["dense"].step
    assert found["IWP"].bytes == found_on(on(1e8), ranks=2)["IWP"].bytes
    assert found["IWP"].inside == pytest.approx(8 * 2 * 3 / 4 * 4 * MODEL.compressed / (1e11 * network.PAYLOAD))
    faster = found_on(replace(nodes, inside_bits=math.inf), ranks=2)["IWP"].step
    assert found["IWP"].step - faster == pytest.approx(found["IWP"].inside) and found["dense"].inside == 0.0


def test_nodes_that_are_not_full_are_refused():
    given = ["estimate", "--model", TINY, "--bandwidth", "1gbit", "--ranks-per-node", "4", "--ranks"]
    for ranks in ("6", "4"):
        done = CliRunner(env={"COLUMNS": "400"}).invoke(app, [*given, ranks])
        assert done.exit_code == 2 and "at least two times --ranks-per-node" in done.output


def test_memory_is_that_of_the_entries_of_a_rank_and_of_a_bucket():
    found, entries, bucket = found_on(on(1e9)), MODEL.compressed, estimate.BUCKET / 4
    (held, more), (of_low_bit, _) = methods.MEMORY["IWP"], methods.MEMORY["low_bit"]
    assert found["IWP"].memory == pytest.approx(entries * held + bucket * more) and found["dense"].memory == 0
    assert of_low_bit * entries < found["low_bit"].memory < (of_low_bit + 4) * entries
    # In local steps, the common weights; they are a part of low_bit's.
    four = found_on(on(1e9), local_steps=4)
    assert four["IWP"].memory == pytest.approx(found["IWP"].memory + 4 * entries)
    assert four["low_bit"].memory == found["low_bit"].memory
    # A node's ranks divide it.
    shared = found_on(on(1e9, per_node=4), ranks=2)["IWP"].memory
    assert shared == pytest.approx(entries / 4 * held + min(entries / 4, bucket) * more)


def test_memory_grows_with_what_is_gathered():
    few, many = (found_on(on(1e9), seconds=SECONDS | {"QSGD": 0.1}, ranks=ranks)["QSGD"] for ranks in (4, 8))
    assert many.memory - few.memory == pytest.approx(many.bytes - few.bytes) and many.bytes > few.bytes
    assert set(methods.MEMORY) == set(methods.METHODS)


def test_break_even_is_where_both_take_as_long():
    found = found_on(on(1e9))
    bits = found["IWP"].break_even
    assert 1e9 < bits < 1e12 and found["dense"].break_even is None
    there = found_on(on(bits))
    assert there["IWP"].step == pytest.approx(min(there["dense"].step, there["fp16"].step), rel=1e-3)
    assert found_on(on(1e9), seconds=SECONDS | {"IWP": 1e4})["IWP"].break_even == 0


def says(bits, optimizer, seconds=SECONDS, model=MODEL, **options):
    return estimate.verdict(list(found_on(on(bits), optimizer, seconds, model).values()), optimizer, **options)


def test_what_is_advised_comes_first_and_is_recommended():
    """docs/choosing.md's order, whatever is faster."""
    for optimizer, first in (("muon", "low_bit"), ("adamw", "low_bit"), ("sgd", "DeMo")):
        assert next(iter(found_on(on(1e8), optimizer))) == first
    assert list(found_on(on(1e8), "adamw")) == ["low_bit", "DeMo", "fp16", "dense", "IWP"]
    assert says(1e8, "muon").startswith("Use low_bit in 3 local steps: ")
    assert says(1e8, "sgd").startswith("Use DeMo: ") and "without momentum" in says(1e8, "sgd")
    # Not worth it: the next.
    assert says(1e8, "adamw", SECONDS | {"low_bit": 1e3}).startswith("Use DeMo: ")
    assert says(1e8, "sgd", SECONDS | {"DeMo": 0.8}).startswith("Use DeMo: ")
    assert " (IWP: " in says(1e8, "sgd", SECONDS | {"DeMo": 0.8})
    assert says(1e8, "sgd", SECONDS | {"DeMo": 1e3}).startswith("Use IWP: ")
    assert says(1e11, "sgd").startswith("Do not use compression here: ")


def test_a_verdict_without_computation_is_an_upper_bound():
    text = says(1e8, "sgd", model=estimate.Model(MODEL.shapes, 0.0), exchange_only=True)
    assert text.startswith("Use DeMo: at most ") and "upper bound" in text and "--compute-ms" in text


def test_a_small_gain_is_not_recommended():
    rows = [
        estimate.Estimate(name, 1.0, 0.0, 0.0, step, None, True)
        for name, step in (("IWP", 1.0), ("fp16", 1.1), ("dense", 2.0))
    ]
    text = "fp16 is enough (IWP would be 1.10 times as fast; less than 1.15 times is not recommended)"
    assert text in estimate.verdict(rows, "sgd")


def test_buckets_are_those_of_a_compressor():
    named = [(str(number), torch.nn.Parameter(torch.zeros(512, 512))) for number in range(80)]  # 1 MiB each
    buckets = IWP(named, collectives=ThreadWorld(1).collectives(0)).buckets
    assert estimate.Model([(512, 512)] * 80, 0.0).buckets() == len(buckets)


def test_methods_that_train_with_an_optimizer():
    """Those that docs/choosing.md names."""
    for optimizer, more in (("adamw", {"DeMo", "DeMo, gather", "Quantized", "QSGD", "TernGrad"}), ("muon", set())):
        allowed = {name for name, method in methods.METHODS.items() if optimizer in method.optimizers}
        assert allowed == {"dense", "fp16", "low_bit"} | more
        assert set(methods.ADVISED[optimizer]) <= allowed


def test_local_steps_exchange_once_in_a_period():
    """Without backward to hide behind; inside a host, gradients are summed in every step."""
    nodes = on(1e8, per_node=4, inside_bits=1e10)
    found, each = found_on(nodes, local_steps=4, ranks=2), found_on(nodes, ranks=2)
    assert found["dense"] == each["dense"]
    one, before = found["IWP"], each["IWP"]
    assert one.bytes == before.bytes / 4 and one.compress == before.compress / 4
    assert one.inside == pytest.approx(before.inside * 5 / 4)
    own = estimate.step_seconds(replace(MODEL, compute=0.0), nodes, measured("IWP", SECONDS["IWP"], 2))
    assert one.step == pytest.approx(MODEL.compute + before.inside + own / 4)
    assert found["low_bit"].local_steps == 4 and each["low_bit"].local_steps == 3


@pytest.mark.parametrize("ranks", [2, 32])
@pytest.mark.parametrize("method", list(methods.METHODS))
def test_measured_bytes_are_those_of_the_formulas(method, ranks):
    """Beyond 8 ranks, payloads that all ranks receive are extrapolated."""
    want = formulas.sent_by(method, TINY_SHAPES, ranks)
    assert kernels.Kernels(TINY_SHAPES).measure(method, ranks).bytes == pytest.approx(want, rel=0.01)


def test_a_sample_sends_its_share(monkeypatch):
    """Also low-rank factors, which are in proportion to the sides of a matrix."""
    monkeypatch.setattr(kernels, "MOST", 400_000)
    sizes = [(512, 512), (512, 128), (1024, 256)] * 4
    sampled, _ = kernels.sample(sizes)
    assert len(sampled) < len(sizes)
    for method in ("IWP", "PowerSGD"):
        want = formulas.sent_by(method, sizes, 4)
        assert kernels.Kernels(sizes).measure(method, 4).bytes == pytest.approx(want, rel=0.01)


def test_hosts_in_a_ring_wait_for_each_other():
    """Four, of eight ranks: a part of a sum passes three links, and its average, too."""
    assert kernels.Kernels(TINY_SHAPES).measure("dense", 4, 8).trips == 6
    assert kernels.Kernels(TINY_SHAPES).measure("IWP", 4, 8).trips == methods.METHODS["IWP"].trips


def test_a_step_waits_for_the_trips_of_its_last_bucket():
    """Once in three local steps, if it exchanges so often."""
    near, far = found_on(on(math.inf)), found_on(network.Network(math.inf, 0.1))
    assert far["dense"].trips == far["fp16"].trips == 6
    for name, one in far.items():
        assert one.step - near[name].step == pytest.approx(0.05 * one.trips / one.local_steps)


def test_an_exchange_that_is_bound_by_the_delay_is_named():
    one, net = found_on(on(1e9))["low_bit"], network.Network(1e9, 0.1)
    says = f"{one.trips} trips take {50 * one.trips:.1f} ms, its bytes {1e3 * net.seconds(3 * one.bytes):.1f} ms"
    assert says in estimate.bound_by_delay(one, net)
    assert not estimate.bound_by_delay(one, replace(net, bits=1e8))


def test_a_method_that_takes_no_local_steps_is_left_out():
    arguments = f"estimate --model {TINY} --ranks 2 --bandwidth 1mbit --round-trip 1s --local-steps 4".split()
    done = CliRunner(env={"COLUMNS": "200"}).invoke(app, arguments)
    assert done.exit_code == 0 and "round trip 1s" in done.output and "is bound by the delay" in done.output
    for name, method in methods.METHODS.items():
        model = torch.nn.Linear(64, 64)
        built = method.build(model.named_parameters(), collectives=Mirror(2))
        refused = pytest.raises(ValueError, match="local steps") if name not in done.output else nullcontext()
        with refused:
            LocalSteps(built, torch.optim.SGD(model.parameters()), 4)


def test_a_real_call(tmp_path):
    file = tmp_path / "new" / "folder" / "out.json"
    arguments = f"estimate --model {TINY} --ranks 4 --bandwidth 10mbit --optimizer adamw --json {file}".split()
    done = CliRunner(env={"COLUMNS": "200"}).invoke(app, arguments)
    assert done.exit_code == 0, done.output
    content = json.loads(file.read_text())
    rows = {row["method"]: row for row in content["rows"]}
    assert set(rows) == set(methods.METHODS) and all(row["compress"] > 0 for row in rows.values())
    printed = ", ".join(f"{name} {row['memory'] / 1e6:,.0f}" for name, row in rows.items() if row["memory"])
    assert f"beside weights and gradients: {printed}" in " ".join(done.output.split()) and "low_bit 0" not in printed
    assert not rows["IWP"]["allowed"] and rows["DeMo"]["allowed"]
    # 230 kB take 0.2 s, what low_bit sends a fiftieth.
    assert content["winner"] == "low_bit" and "Use low_bit in 3 local steps: at most " in done.output


def test_the_version():
    assert CliRunner().invoke(app, ["--version"]).output == f"hvd-compress {__version__}\n"


@pytest.mark.parametrize("command", [["bench"], ["estimate", "--ranks", "2", "--bandwidth", "1gbit"]])
def test_a_wrong_output_file_is_named_before_the_measurement(tmp_path, monkeypatch, command):
    monkeypatch.setattr(kernels.Kernels, "__init__", None)
    monkeypatch.setattr(bench, "measure", None)
    (tmp_path / "file").touch()
    for file, says in ((tmp_path / "file" / "out.json", "cannot make the folder"), (tmp_path, "is a directory")):
        done = CliRunner(env={"COLUMNS": "400"}).invoke(app, [*command, "--model", TINY, "--json", str(file)])
        assert done.exit_code == 2 and says in done.output, done.output


@pytest.mark.parametrize(
    "command, says",
    [
        (f"estimate --model {TINY} --ranks 2 --bandwidth 1gbit --inside 10gbit", "give --ranks-per-node"),
    ],
)
def test_an_option_that_would_do_nothing_is_refused(command, says):
    done = CliRunner(env={"COLUMNS": "400"}).invoke(app, command.split())
    assert done.exit_code == 2 and says in done.output


@pytest.mark.parametrize("number", ["inf", "nan", "1e999", "-inf"])
@pytest.mark.parametrize(
    "command",
    [f"estimate --model {TINY} --ranks 2 --bandwidth 1gbit --compute-ms", "doctor --timeout", "bench --timeout"],
)
def test_a_number_that_is_not_finite_is_refused_before_anything_is_measured(command, number, monkeypatch):
    monkeypatch.setattr(kernels.Kernels, "__init__", None)
    monkeypatch.setattr(bench, "measure", None)
    monkeypatch.setattr(doctor, "examine", None)
    *_, option = command.split()
    done = CliRunner(env={"COLUMNS": "400"}).invoke(app, [*command.split(), number])
    assert done.exit_code == 2 and f"Invalid value for '{option}'" in done.output, done.output
    assert number in ("nan", "-inf") or "must be finite" in done.output


def test_a_wrong_argument_is_named():
    done = CliRunner(env={"COLUMNS": "200"}).invoke(
        app, ["estimate", "--model", "x", "--ranks", "2", "--bandwidth", "1gbit"]
    )
    assert done.exit_code == 2 and "PATH.py:FUNCTION" in done.output
