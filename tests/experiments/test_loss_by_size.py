"""The loss by size: its text and tasks, and that a cut training goes on as if it had not been cut."""

import json
import math
from dataclasses import asdict, replace

import loss_by_size
import pytest
import torch
from experiment import text
from simulation import sizes, training
from simulation.checkpoints import Checkpoint, OutOfTime, Probe, Timed
from simulation.setting import SIZES, TASKS, Setting

CPU, RATES = torch.device("cpu"), len(sizes.RATES)
#: All that a state can hold: residuals, momentum of the averages, counted steps.
CUT = [
    Setting(2, period=2, task="gpt-0.3m-20", restore_length=True, others=2, outer_momentum=0.5),
    Setting(2, period=2, bits=1, finer=1, task="gpt-0.3m-20", optimizer="adamw"),
    Setting(1, period=1, bits=0, task="gpt-0.3m-20"),
]


@pytest.fixture
def packages(tmp_path):
    """Roots of a standard library and of packages within it, with 60 files of random bytes."""
    root = tmp_path / "lib"
    for index in range(60):
        place = root / ("site-packages/tests" if index % 2 else "json")
        place.mkdir(parents=True, exist_ok=True)
        content = torch.randint(256, (200,), generator=torch.Generator().manual_seed(index))
        (place / f"f{index}.py").write_bytes(bytes(content.tolist()))
    return root, root / "site-packages"


@pytest.fixture
def short(packages, monkeypatch):
    """All sizes train the smallest model for five steps, in float32."""
    found = text.read_sources(packages)
    for module in (text, loss_by_size):
        monkeypatch.setattr(module, "sources", lambda: found)
    monkeypatch.setattr("experiment.data.load", lambda name, folder, context: text.installed_sources(context))
    for name, task in SIZES.items():
        tiny = replace(task, model="gpt-70k", steps=5, windows=4, context=16, warm_up=2, bfloat16=False)
        monkeypatch.setitem(TASKS, name, tiny)
        monkeypatch.setitem(SIZES, name, tiny)
    return found


def test_the_text_is_of_all_packages_and_held_out_by_file(packages):
    found, again = text.read_sources(packages), text.read_sources(packages[::-1])
    assert torch.equal(found.train, again.train) and found.checksum == again.checksum
    assert len(found.listing) == 60 and len(found.train) + len(found.held_out) == 60 * 200
    held_out = [line.split()[0] for line in found.listing if line.endswith("held out")]
    assert len(held_out) * 200 == len(found.held_out) > 0 and all(map(text.is_held_out, held_out))
    (packages[0] / "json" / "f0.py").write_bytes(b"other")
    assert text.read_sources(packages).checksum != found.checksum


def test_a_text_has_each_content_once_and_no_long_file(packages):
    found = text.read_sources(packages)
    for index in range(9):  # some of these names are held out
        (packages[1] / f"z{index}.py").write_bytes((packages[0] / "json" / "f0.py").read_bytes())
    (packages[1] / "long.py").write_bytes(b"1" * (text.LONGEST_FILE + 1))
    assert text.read_sources(packages).checksum == found.checksum


def test_the_text_of_this_python_is_long_enough_for_the_sizes():
    found = text.sources()
    needed = max(task.steps * task.windows * task.context for task in SIZES.values())
    assert needed / 20 < len(found.train) and 0.05 < len(found.held_out) / len(found.train) < 0.2


def test_steps_are_those_of_twenty_tokens_a_parameter():
    for name, task in SIZES.items():
        assert task.steps == round(20 * sizes.parameters(name) / (task.windows * task.context))
        assert 1000 < task.steps < 3000 and task.windows <= 256
    millions = [round(sizes.parameters(name) / 1e6, 1) for name in SIZES]
    assert millions == [0.3, 1.0, 2.5, 5.5, 9.7]


class CutAt(Checkpoint):
    """Time is up before a step."""

    def __init__(self, file, key, step):
        super().__init__(file, key, math.inf)
        self._step = step

    def before(self, step, state):
        if step == self._step:
            self._deadline = 0.0
        super().before(step, state)


@pytest.mark.parametrize("setting", CUT, ids=str)
def test_a_cut_training_goes_on_to_the_same_loss(setting, short, tmp_path):
    batch, file = [setting, replace(setting, rate=1e-3, seed=1)], tmp_path / "new" / "cut.pt"
    whole = training.simulate(batch, CPU)
    for step in (0, 3, 4):  # cut again, and not from the start
        with pytest.raises(OutOfTime, match=f"before step {step}"):
            training.simulate(batch, CPU, None, CutAt(file, "key", step))
    found, other = Checkpoint(file, "key", math.inf), Checkpoint(file, "other", math.inf)
    assert other.resume(CPU) is None and found.resume(CPU)[0] == 4
    assert training.simulate(batch, CPU, None, found) == whole
    found.remove()
    assert found.resume(CPU) is None


def test_bfloat16_changes_the_gradients_a_little(short, monkeypatch):
    setting = Setting(2, period=2, task="gpt-0.3m-20")
    exact = training.simulate([setting], CPU)[0]
    monkeypatch.setitem(TASKS, setting.task, replace(TASKS[setting.task], bfloat16=True))
    assert exact != training.simulate([setting], CPU)[0] == pytest.approx(exact, rel=0.02)


@pytest.mark.parametrize("steps", [1, 2, 5, 40])
def test_a_probe_ends_a_training_early(steps, short, monkeypatch):
    task = "gpt-0.3m-20"
    monkeypatch.setitem(TASKS, task, replace(TASKS[task], steps=steps))
    probe = Probe(steps, CPU)
    with pytest.raises(Timed):
        training.simulate([Setting(2, task=task)], CPU, None, probe)
    assert probe.ready > 0 and (probe.step > 0) is (steps > 1)


def test_small_sizes_come_first_then_larger_ones_a_rate_at_a_time():
    order = [(group[0][0].task, len(group[0])) for group in sizes.groups({})]
    small, large = sizes.SMALL, [name for name in SIZES if name not in sizes.SMALL]
    assert order == [(name, RATES) for name in small] + [(name, 1) for name in large * RATES]
    batches = [batch for group in sizes.groups({}) for batch in group]
    runs = [setting for batch in batches for setting in batch]
    assert len(set(runs)) == len(runs) == len(SIZES) * 3 * RATES
    assert all(len(group) == 3 for group in sizes.groups({}))
    one_by_one = [setting for group in sizes.groups({}, together=()) for (setting,) in group]
    assert set(one_by_one) == set(runs) and len(one_by_one) == len(runs)


def test_a_larger_size_begins_with_the_best_rate_of_a_smaller_one():
    dense, local, _ = sizes.compared("gpt-1m-20")
    runs = {replace(dense, rate=rate): 1 + rate for rate in sizes.RATES}
    runs |= {replace(local, rate=rate): 1 - rate for rate in sizes.RATES}
    found = [sizes.likely(runs, setting) for setting in sizes.compared("gpt-5m-20")]
    assert found == [[1e-3, 2e-3, 4e-3, 8e-3], [8e-3, 4e-3, 2e-3, 1e-3], [2e-3, 1e-3, 4e-3, 8e-3]]


def test_the_table_has_every_size_over_its_dense_training():
    runs = {replace(s, rate=2e-3): 2.0 + 0.1 * i for name in SIZES for i, s in enumerate(sizes.compared(name))}
    runs[replace(sizes.compared("gpt-1m-20")[0], rate=1e-3)] = 1.0
    for name, row in zip(SIZES, sizes.rows(runs), strict=True):
        better = name == "gpt-1m-20"
        assert row["dense"] == ("1.000 (0.001, of 2)" if better else "2.000 (0.002, of 1)")
        assert row["48 times fewer bytes"] == f"+{110 if better else 5:.1f}% (0.002, of 1)"
        assert row["171 times fewer bytes"] == f"+{120 if better else 10:.1f}% (0.002, of 1)"
    assert all("-" in row.values() for row in sizes.rows({}))


@pytest.fixture
def called(short, tmp_path, monkeypatch, capsys):
    def call(*options):
        folders = ["--results", str(tmp_path / "runs.jsonl"), "--checkpoints", str(tmp_path / "kept")]
        monkeypatch.setattr("sys.argv", ["loss_by_size.py", *folders, *options])
        loss_by_size.main()
        return capsys.readouterr()

    return call


def test_sizes_are_trained_once_and_shown(called, tmp_path):
    tasks = ["--tasks", "gpt-1m-20", "gpt-5m-20"]
    called("--train", *tasks)
    lines = [json.loads(line) for line in (tmp_path / "runs.jsonl").read_text().splitlines()]
    assert len(lines) == 2 * 3 * RATES and {line["text"] for line in lines} == {loss_by_size.sources().checksum}
    assert {line["torch"] for line in lines} == {torch.__version__} and {line["device"] for line in lines} == {"cpu"}
    called("--train", *tasks)
    assert len((tmp_path / "runs.jsonl").read_text().splitlines()) == len(lines) and not list(
        (tmp_path / "kept").glob("*")
    )
    assert called().out.count(f"of {RATES})") == 6


def test_what_does_not_fit_is_skipped_and_what_was_cut_goes_on(called, tmp_path, monkeypatch):
    file, only = tmp_path / "runs.jsonl", ("--tasks", "gpt-0.3m-20")
    assert "no time is left" in called("--train", "--most-seconds", "0", *only).err and not file.exists()
    with monkeypatch.context() as patch:
        patch.setattr(loss_by_size.Estimates, "seconds", lambda *_: 1000.0)
        assert "skipped, needs 3000 s" in called("--train", "--most-seconds", "2000", *only).err and not file.exists()
    with monkeypatch.context() as patch:
        patch.setattr(loss_by_size, "Checkpoint", lambda path, key, _: CutAt(path, key, 3))
        assert "cut before step 3" in called("--train", *only).err and not file.exists()
    assert len(list((tmp_path / "kept").glob("*.pt"))) == 1
    called("--train", *only)
    assert len(file.read_text().splitlines()) == 3 * RATES and not list((tmp_path / "kept").glob("*"))


def test_a_probe_says_what_all_runs_take(called, tmp_path):
    found = called("--probe", "--tasks", "gpt-0.3m-20", "gpt-10m-20")
    assert (
        found.out.count(" s\n") == 2 * RATES
        and found.err.count("s a step") == 4
        and not (tmp_path / "runs.jsonl").exists()
    )


def test_runs_of_another_text_are_refused(called, tmp_path):
    line = {"setting": asdict(Setting(task="gpt-0.3m-20")), "bits_per_byte": 1.0, "text": "other"}
    (tmp_path / "runs.jsonl").write_text(json.dumps(line) + "\n")
    with pytest.raises(ValueError, match="pass another --results"):
        called("--train")


def test_the_text_is_described(called, tmp_path, short):
    found = called("--text", "--write-list", str(tmp_path / "list"))
    assert found.out == f"{short}\n" and (tmp_path / "list").read_text().splitlines() == short.listing
