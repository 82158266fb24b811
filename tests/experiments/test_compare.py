"""scripts/experiments/compare.py: variants, densities for a budget, results that are kept; and one real comparison."""

import math
import subprocess
import sys
import time

import compare
import pytest
from experiment import runs
from experiment.result_file import read_runs, write_run


def result(compression="none", seed=0, accuracy=0.9, wire=1e6, **config):
    history = [
        {"epoch": e, "train_loss": 1 / e, "test_accuracy": accuracy * e / 2, "wire_bytes": wire * e, "seconds": e}
        for e in (1, 2)
    ]
    return {
        "test_accuracy": accuracy, "train_loss": 0.5, "epochs": 2, "steps": 100, "ranks": 4,
        "wire_ratio": 40.0, "wire_ratio_last": 52.2, "wire_bytes_per_step": wire, "dense_bytes_per_step": 1e6,
        "step_ms_median": 20.0, "compress_ms_median": 1.5, "replicas_equal": True, "history": history,
        "config": {"compression": compression, "seed": seed, "lr": 0.1, "json": f"{seed}.json", **config},
    }  # fmt: skip


def text_result(compression, seed, bits, **config):
    made = result(compression, seed, **config)
    for entry in (made, *made["history"]):
        entry["test_bits_per_byte"] = bits
        del entry["test_accuracy"]
    return made


def test_variants_have_their_own_options_and_methods_only_those_they_know():
    given = ["--methods", "none,iwp,iwp@one,ddp-qsgd,demo", "--momentum-correction", "--epochs", "3"]
    args = compare.parse([*given, "--option", "iwp@one:--leaders 1", "--", "--lr", "0.2"])
    of = {variant.label: compare.Comparison(args).arguments(variant, 7) for variant in args.variants}
    common = ("--lr", "0.2", "--data", "digits", "--model", "cnn", "--epochs", "3")
    ours = ("--momentum-correction", "--dense-values", "fp16")
    assert of["none"] == (*common, "--compression", "none", "--host", "horovod", "--seed", "7")
    assert of["iwp"] == (*common, "--compression", "iwp", "--host", "horovod", "--seed", "7", *ours)
    assert of["iwp@one"] == (*of["iwp"], "--leaders", "1")
    own = ("--optimizer", "plain", "--dense-values", "fp16")
    assert of["demo"] == (*common, "--compression", "demo", "--host", "horovod", "--seed", "7", *own)
    assert of["ddp-qsgd"] == (*common, "--compression", "qsgd", "--host", "ddp", "--seed", "7", *ours[1:])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("--methods iwp,nothing", "unknown method 'nothing'"),
        ("--methods iwp,iwp", "only once"),
        ("--methods iwp --option fft:--leaders=1", "expected METHOD:OPTIONS"),
        ("--methods iwp --budgets 2", "a share"),
        ("--methods iwp --lrs fft:0.1", "expected RATES or METHOD:RATES"),
        ("--methods iwp,ddp-iwp --simulate", "not torch DDP: ddp-iwp"),
        ("--methods iwp --budgets 1/0", "Fraction"),
        ("--methods iwp --budgets 1/64 --option iwp:--density=1/8", "determined by the budget"),
    ],
)
def test_wrong_arguments_are_refused(wrong, message, capsys):
    with pytest.raises(SystemExit):
        compare.parse(wrong.split())
    assert message in capsys.readouterr().err


# Densities.


def counted(law):
    asked = []

    def measure(density):
        asked.append(density)
        return law(density)

    return measure, asked


def test_affine_bytes_need_three_measurements():
    measure, asked = counted(lambda density: 0.002 + 0.4 * density)
    density, share = compare.find(measure, 1 / 64)
    assert share == pytest.approx(1 / 64, rel=0.01)
    assert density == pytest.approx((1 / 64 - 0.002) / 0.4, rel=1e-3)
    assert asked == [*compare.PROBES, density]


@pytest.mark.parametrize(
    ("law", "why"),
    [
        (lambda density: 0.1 + density, "besides"),
        (lambda density: 0.001 * density, "all entries"),
        (lambda density: 0.5, "grow"),
    ],
)
def test_a_budget_out_of_reach_says_why(law, why):
    with pytest.raises(compare.Unreachable, match=why):
        compare.find(law, 1 / 64)


def test_a_row_may_take_local_steps_and_its_probes_hold_whole_periods(tmp_path, monkeypatch):
    executed = []

    def execute(self, timeout):
        executed.append(self.configuration())
        return result("topk", wire=1000 + 5e5 * executed[-1]["density"])

    monkeypatch.setattr(runs.Run, "execute", execute)
    given = ["--methods", "topk,topk@local", "--option", "topk@local:--local-steps 30 --unsent buffer", "--epochs", "4"]
    of = compare.Comparison(compare.parse([*given, "--budgets", "1/64", "--out", str(tmp_path)]))
    of.train(of.decide())
    steps = [(config["local_steps"], config["unsent"], config["max_steps"]) for config in executed]
    assert steps == [(None, None, 20)] * 3 + [(30, "buffer", 60)] * 3 + [(None, None, None), (30, "buffer", None)]


# Learning rates.


def test_each_row_is_trained_at_its_best_learning_rate_by_further_seeds(tmp_path, monkeypatch, capsys):
    best = {"none": 2e-3, "topk": 1e-2}

    def execute(self, timeout):
        config = self.configuration()
        bits = 2.0 + abs(math.log(config["lr"] / best[config["compression"]])) + config["seed"] / 100
        if config["lr"] == 4e-3:
            bits = math.nan  # diverged
        return text_result(config["compression"], config["seed"], bits, lr=config["lr"])

    monkeypatch.setattr(runs.Run, "execute", execute)
    given = ["--methods", "none,topk", "--lrs", "1e-3,2e-3,4e-3", "--lrs", "topk:3e-3,1e-2", "--seeds", "0,1,2"]
    given += ["--data", "text", "--model", "gpt", "--simulate", "--out", str(tmp_path), "--", "--optimizer", "adamw"]
    assert compare.main(given) == 0
    lines = [line for line in (tmp_path / "table.md").read_text().splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")][::2][:2] for line in lines]
    assert cells == [
        ["method", "bits per byte"],
        ["none, lr 0.002", "2.0100 ± 0.0100 (3)"], ["topk, lr 0.01", "2.0100 ± 0.0100 (3)"],
        ["method", "bits per byte"],
        ["none, lr 0.001", "2.6931"], ["none, lr 0.002", "2.0000"], ["none, lr 0.004", "nan"],
        ["topk, lr 0.003", "3.2040"], ["topk, lr 0.01", "2.0000"],
    ]  # fmt: skip
    capsys.readouterr()


# Results that are kept, and failures.


@pytest.fixture
def run(tmp_path):
    return runs.Run(tmp_path / "runs.jsonl" / "dgc-0", 2, ("--compression", "dgc", "--density", "1/8"))


def test_a_result_of_the_same_configuration_is_taken_and_of_another_refused(run):
    assert run.result() is None
    config = {**run.configuration(), "json": "elsewhere", "progress": False, "torch": "1"}
    assert config.pop("amp") == "off"  # an option that the run did not have yet
    assert config.pop("ranks") == 2 and config["density"] == 1 / 8 and config["momentum_correction"] is True
    write_run(run.path, {"config": config, "ranks": 2, "step": 3})
    assert run.result()["step"] == 3
    for other in (
        runs.Run(run.path, 4, run.arguments),
        runs.Run(run.path, 2, (*run.arguments, "--lr", "0.3")),
        runs.Run(run.path, 2, (*run.arguments, "--seed", "1")),
    ):
        with pytest.raises(runs.OtherConfiguration, match=r"runs.jsonl/dgc-0 is of a run with (ranks|lr|seed) .*, not"):
            other.result()


def test_a_result_with_other_settings_is_refused(run):
    config = run.configuration()
    made = {"config": {**config, "settings": {"HOROVOD_X": "1", "OMPI_MCA_usual": "1"}}, "ranks": config.pop("ranks")}
    with_x, with_y = (runs.Run(run.path, 2, run.arguments, settings={f"HOROVOD_{name}": "1"}) for name in "XY")
    write_run(run.path, {**made, "asked": {"HOROVOD_X": "1"}})
    assert with_x.result()
    for other, says in ((with_y, "HOROVOD_Y None, not '1'"), (run, "HOROVOD_X '1', not None")):
        with pytest.raises(runs.OtherConfiguration, match=says):
            other.result()


def test_a_run_that_fails_or_hangs_is_reported_and_ended(run, tmp_path, monkeypatch):
    def script(text):
        monkeypatch.setattr(runs.Run, "command", lambda self: ["bash", "-c", text])

    script("echo first; echo last; exit 3")
    with pytest.raises(runs.Failed, match=r"(?s)dgc-0 ended without a result.*last"):
        run.execute(20)
    script(f"(sleep 2; touch {tmp_path}/alive) & echo waiting; wait")
    with pytest.raises(runs.Failed, match=r"(?s)killed after 0.5 s.*waiting"):
        run.execute(0.5)
    time.sleep(2.5)
    assert not (tmp_path / "alive").exists()  # its child is gone, too


def test_a_failed_run_does_not_stop_the_others(tmp_path, monkeypatch, capsys):
    def execute(self, timeout):
        if self.name == "fp16-0":
            raise runs.Failed("fp16-0 ended with status 1\n    its last line")
        return result("none") if self.name != "iwp-0" else {**result("iwp", density=1 / 32), "replicas_equal": False}

    monkeypatch.setattr(runs.Run, "execute", execute)
    assert compare.main(["--methods", "none,fp16,iwp", "--out", str(tmp_path)]) == 1
    errors = capsys.readouterr().err
    assert "its last line" in errors and "iwp-0: its replicas differ" in errors
    page = (tmp_path / "table.md").read_text()
    assert "Replicas differ: iwp." in page and "its last line" in page


@pytest.mark.slow
def test_a_real_comparison_and_nothing_the_second_time(tmp_path):
    pytest.importorskip("horovod.torch", reason="Horovod is not installed")
    given = ["--methods", "none,topk", "--budgets", "1/16", "--ranks", "2", "--epochs", "1", "--timeout", "100"]
    command = [sys.executable, compare.__file__, *given, "--out", str(tmp_path)]

    def call(*more):
        return subprocess.run([*command, *more], capture_output=True, text=True, timeout=700)

    first = call()
    assert first.returncode == 0, first.stderr
    assert all((tmp_path / name).stat().st_size for name in ["table.md"])
    trained = read_runs(tmp_path / "runs.jsonl")
    assert sorted(trained) == ["none-0", "topk-1of16-0"]
    share = 1 / trained["topk-1of16-0"]["wire_ratio"]
    assert share == pytest.approx(1 / 16, rel=0.01)

    files = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*.jsonl")}
    second = call()
    assert second.returncode == 0 and second.stdout == first.stdout, second.stderr
    assert files == {file: file.stat().st_mtime_ns for file in files}
    other = call("--", "--lr", "0.3")
    assert other.returncode == 2 and "lr 0.1, not 0.3" in other.stderr
