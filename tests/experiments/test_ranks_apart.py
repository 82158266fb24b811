"""The simulation of many ranks: its trainings are those of the experiments and of torch's optimizers, its rounding that
of low_bit, and the documentation shows its stored runs."""

import json
import math
import string
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path

import pytest
import ranks_apart
import torch
import torch.nn.functional as F
from experiment import models, text
from simulation import optimizers, tables, training, weights
from simulation.averages import Average, Feedback, Lengths, rounded
from simulation.common import Common
from simulation.setting import TASKS, Setting
from simulation.weights import RUN, Layout, gradients
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode

from hvd_compress.reference.low_bit import encode, lloyd_max

PAGE = Path(__file__).resolve().parents[2] / "docs" / "results" / "ranks-apart" / "tables.md"
CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """With texts of both tasks; these take four steps of four windows."""
    for name, task in TASKS.items():
        monkeypatch.setitem(TASKS, name, replace(task, steps=4, windows=4, warm_up=2))
    letters = (string.ascii_letters + string.digits + " .\n").encode()
    numbers = torch.randint(len(letters), (4000,), generator=torch.Generator().manual_seed(4))
    (tmp_path / text.SHAKESPEARE).write_bytes(letters + bytes(letters[i] for i in numbers.tolist()))
    parts = {name: numbers[:3000].byte() for name in ("train", "held_out")}
    torch.save(parts, tmp_path / text.STORED_LIBRARY)
    return tmp_path


@pytest.fixture
def unrounded(monkeypatch):
    """All in float64: what rounding moves is then too little to turn a sign or a code, from which float32's grows to
    other losses on another processor."""
    for shorter in ("bfloat16", "float"):
        monkeypatch.setattr(torch.Tensor, shorter, lambda tensor: tensor)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


#: More than float64 moves the loss of a few steps, relatively, and less than anything else does.
LEAST = 1e-7


def simulate(folder, *settings):
    return training.simulate(settings, CPU, folder)


@pytest.mark.parametrize("cached", [weights.CACHED, 100, 0], ids=["one piece", "2, 2 and 1", "a window each"])
@pytest.mark.parametrize("vocabulary", [256, 65])
def test_each_rank_has_the_gradient_of_the_model(vocabulary, cached, monkeypatch):
    monkeypatch.setattr(weights, "CACHED", cached)
    torch.manual_seed(1)
    model, ranks = models.build("gpt", vocabulary, 16), 3
    layout = Layout(model)
    values = {
        name: torch.stack([p + 0.1 * torch.randn_like(p) for _ in range(ranks)]).detach()
        for name, p in model.named_parameters()
    }
    tokens = torch.randint(vocabulary, (ranks, 5, 17))
    found = layout.parameters(gradients(layout, layout.flatten(values), tokens))
    for rank in range(ranks):
        leaves = {name: w[rank].clone().requires_grad_() for name, w in values.items()}
        logits = functional_call(model, leaves, (tokens[rank, :, :-1],))
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[rank, :, 1:].flatten())
        wanted = torch.autograd.grad(loss, [*leaves.values()])
        for name, gradient in zip(leaves, wanted, strict=True):
            torch.testing.assert_close(found[name][rank], gradient, rtol=1e-4, atol=1e-6)


def test_a_layout_has_all_parameters_and_pads_what_is_compressed():
    model = models.build("gpt", 65, 16)
    layout, weights = Layout(model), {name: p.detach() for name, p in model.named_parameters()}
    flat = layout.flatten(weights)
    for name, found in layout.parameters(flat[None]).items():
        assert torch.equal(found[0], weights[name])
    assert set(layout.shapes) == set(weights) and flat.shape == (layout.size,)
    lengths = layout.run_lengths(layout.compressed)
    assert len(lengths) * RUN == layout.size - layout.compressed
    # The embedding, 65 x 96, ends within a run.
    assert sum(lengths) == sum(w.numel() for w in weights.values() if w.dim() == 2) and min(lengths) == 6240 % RUN
    assert (flat[: layout.compressed] == 1).all()  # norms
    matrices = sum(weights[name].numel() for name in models.hidden_matrices(model))
    assert layout.size - layout.matrices == matrices == sum(s.numel() * count for s, count in layout.stacks)


@pytest.mark.parametrize("lengths", [[512, 512], [512, 80, 512]])
def test_what_was_rounded_off_is_sent_later(lengths):
    torch.manual_seed(2)
    mask = (torch.arange(RUN) < torch.tensor(lengths)[:, None]).flatten()
    rounds = [torch.randn(2, 4, len(mask)) * mask for _ in range(5)]
    feedback, sent = Feedback(rounds[0], lengths, 2), torch.zeros(2, len(mask))
    for tensors in rounds:
        sent += feedback.mean(tensors)
    left = feedback.residuals.mean(1) + feedback.owners
    torch.testing.assert_close(sent + left, sum(rounds).mean(1), rtol=0, atol=1e-5)
    assert left.norm() > 0.1 and (sent[:, ~mask] == 0).all()


@pytest.mark.parametrize("bits", [1, 2, 8])
def test_values_are_rounded_as_low_bit_rounds_them(bits):
    torch.manual_seed(3)
    lengths = [512, 512, 80, 512, 512]
    x = torch.randn(3, len(lengths), RUN) * torch.logspace(-6, 3, len(lengths))[:, None]
    x[1, 3] = 0
    mask = torch.arange(RUN) < torch.tensor(lengths)[:, None]
    found = rounded(x * mask, torch.tensor(lengths, dtype=torch.float64), lloyd_max(bits))
    for rank in range(len(x)):
        wanted = encode(x[rank][mask], torch.tensor(lengths), lloyd_max(bits), len(lengths))[1]
        assert torch.equal(found[rank][mask], wanted)


def test_an_average_rounds_all_but_what_is_before_its_start():
    layout = Layout(models.build("gpt", 65, 16))
    weights = torch.randn(2, 3, layout.size)
    mean = weights.mean(1)
    for end, start in (
        (layout.size, layout.compressed),
        (layout.size, layout.matrices),
        (layout.matrices, layout.compressed),
    ):
        found = Average(weights[..., :end], layout, start, 2).mean(weights[..., :end])
        assert torch.equal(found[:, :start], mean[:, :start])
        assert (found[:, start:] != mean[:, start:end]).float().mean() > 0.9
        assert (found[:, start:] - mean[:, start:end]).norm() < 0.8 * mean[:, start:end].norm()
    assert torch.equal(Average(weights, layout, layout.compressed, 0).mean(weights), mean)


def test_lengths_are_those_of_the_ranks_own_differences():
    layout = Layout(models.build("gpt", 65, 16))
    differences = torch.zeros(1, 2, layout.size)
    differences[:, 0] = 1
    names, numbers = list(layout.shapes), layout.numbers(CPU)
    one, other, third = (numbers == names.index(n) for n in ("positions", "norm.weight", "words.weight"))
    differences[:, 1, one] = 1
    differences[:, 1, other] = -1
    differences[:, :, third] = torch.tensor([1.0, -0.99])[:, None]  # the mean is 200 times as short
    factors = Lengths(layout, CPU).factors(differences, differences.mean(1))[0]
    torch.testing.assert_close(factors[one], torch.ones_like(factors[one]))
    assert (factors[other] == 1).all()  # of a mean of 0
    torch.testing.assert_close(factors[~(one | other)], torch.full_like(factors, math.sqrt(2))[~(one | other)])


@pytest.mark.parametrize(
    "setting",
    [
        Setting(2, period=2),
        Setting(2, period=2, others=8),
        Setting(1, period=1, bits=0),
        Setting(4, task="nanogpt", period=2, bits=1),
        Setting(2, task="nanogpt", optimizer="adamw", period=2, restore_length=True),
        Setting(2, period=2, averages="once", restore_length=True),
        Setting(4, task="nanogpt", period=2, averages="replay", own=0.5),
    ],
    ids=str,
)
def test_runs_together_are_those_alone(setting, folder, unrounded):
    settings = [setting, replace(setting, rate=1e-3, seed=1), replace(setting, seed=2)]
    together = simulate(folder, *settings)
    alone = [value for s in settings for value in simulate(folder, s)]
    assert together == pytest.approx(alone, rel=LEAST / 100)
    assert min(abs(together[0] - other) for other in together[1:]) > LEAST * together[0]


@pytest.mark.parametrize(
    "setting",
    [Setting(2, others=8, restore_length=True), Setting(1, period=1, bits=0), Setting(2, task="nanogpt")]
    + [Setting(2, task="nanogpt", optimizer="adamw", others=2), Setting(2, averages="once", restore_length=True)]
    + [Setting(2, task="gpt-adamw", averages="replay", own=0.5)],
    ids=str,
)
def test_no_step_waits_for_a_gpu_or_mixes_devices(setting, folder, monkeypatch):
    task, settings, gpu = TASKS[setting.task], [setting, replace(setting, seed=1)], torch.device("meta")
    common, layout = training.initial_weights(task, settings, CPU)
    shape = training.batches(task.text(folder), task, settings, CPU).shape
    monkeypatch.setattr("simulation.averages.lloyd_max", lambda bits: torch.ones(2**bits))
    with FakeTensorMode(allow_non_fake_inputs=True), Devices() as seen:  # it refuses to read a value
        fake = torch.empty(common.shape, device=gpu)
        tokens = torch.empty(shape, dtype=torch.int64, device=gpu)
        training.train(task, settings, layout, fake, tokens)
        losses = weights.losses(layout, fake, [tokens[0, 0, 0]])
    assert losses.device == gpu and losses.shape == (2,)
    # Copies from the CPU: levels, rates and the like, before the first step.
    assert 0 < seen.last_copy < seen.first_product


class Devices(TorchDispatchMode):
    """Counts operators: the last one between devices, and the first product of matrices."""

    def __init__(self):
        super().__init__()
        self.count, self.last_copy, self.first_product = 0, 0, 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.count += 1
        result = operator(*args, **(kwargs or {}))
        of = {
            x.device.type for x in (*args, *(kwargs or {}).values(), result) if isinstance(x, torch.Tensor) and x.dim()
        }
        if len(of) > 1:
            self.last_copy = self.count
        if operator is torch.ops.aten.bmm.default:
            self.first_product = self.first_product or self.count
        return result


@pytest.mark.parametrize(
    "change",
    [{"ranks": 2, "bits": 0, "period": 1}, {"period": 4}, {"restore_length": True}]
    + [{"finer": 1}, {"outer_rate": 0.5}, {"outer_momentum": 0.5}, {"averages": "once"}, {"averages": "replay"}]
    + [{"averages": "replay", "own": 1.0}, {"averages": "replay", "own": 0.5}, {"averages": "once", "own": 0.0}],
    ids=str,
)
def test_what_is_sent_changes_the_run(change, folder, unrounded):
    setting = Setting(4, 1e-2, period=2, task="nanogpt", bits=1)
    before, after = simulate(folder, setting) + simulate(folder, replace(setting, **change))
    assert abs(before - after) > LEAST * before


@pytest.mark.parametrize("averages, own", [("once", None), ("once", 0.5), ("replay", None), ("replay", 1.0)])
@pytest.mark.parametrize("task", ["gpt", "gpt-adamw", "nanogpt"])
def test_averages_of_one_rank_after_each_step_are_dense_training(task, averages, own, folder, unrounded):
    dense = Setting(1, 1e-2, period=1, bits=0, task=task)
    (wanted,) = simulate(folder, dense)
    assert simulate(folder, replace(dense, averages=averages, own=own)) == [pytest.approx(wanted, rel=LEAST / 100)]


@pytest.mark.parametrize("task", ["gpt", "gpt-adamw", "nanogpt"])
def test_the_others_move_by_the_average_of_summed_gradients(task, unrounded):
    """Equal gradients in a period, so that each form's steps are those of the task's optimizer with the average."""
    steps, size, decay, rates = 3, 5, torch.tensor(0.1), torch.tensor([[0.1], [0.2], [0.3]])
    gradients = torch.randn(4, 1, 2, size)
    start, like = torch.randn(1, size), torch.zeros(1, 2, size)
    usual, wanted = optimizers.others(TASKS[task], start), start.clone()
    replayed = Common(Setting(2, averages="replay", own=1.0), TASKS[task], like)
    dropped = Common(Setting(2, averages="replay"), TASKS[task], like)
    once = Common(Setting(2, averages="once", own=0.5), TASKS[task], like)
    found, same, single = (start.clone() for _ in range(3))
    for gradient in gradients:
        local = optimizers.others(TASKS[task], like)
        local.load(usual)
        for _ in range(steps):
            # Local steps begin with the common state in each period.
            torch.testing.assert_close(replayed.update(gradient), local.update(gradient))
            assert not dropped.update(gradient).any()
            once.update(gradient)
        for rate in rates:
            wanted = wanted * (1 - rate * decay) - rate * usual.update(gradient.mean(1))
        for common, moved in ((replayed, found), (dropped, same), (once, single)):
            torch.testing.assert_close(common.sums, steps * gradient)
            common.step(moved, common.sums.mean(1), rates, decay)
            assert not common.sums.any()
        torch.testing.assert_close(found, wanted)
        torch.testing.assert_close(found, same)
    # As much momentum is left as after that many steps.
    torch.testing.assert_close(once._common.predicted(), usual.predicted())
    assert not torch.allclose(single, wanted)


def test_one_step_of_a_period_raises_what_belongs_to_time(unrounded):
    g, h = torch.randn(2, 1, 6)
    sign = optimizers.Sign(g)
    sign.update(g, 3)
    # Up to the factor that its sign drops, momentum 0.95 ** 3 with the gradient itself.
    assert torch.equal(sign.update(h, 3), (h + 0.95**3 * (0.95**3 * g + h)).sign())
    adamw = optimizers.AdamW(g, (0.9, 0.99))
    mean, square = (1 - 0.9**3) * g, (1 - 0.99**3) * g**2
    wanted = mean / (1 - 0.9**3) / ((square / (1 - 0.99**3)).sqrt() + 1e-8)
    torch.testing.assert_close(adamw.update(g, 3), wanted)
    mean, square = 0.9**3 * mean + (1 - 0.9**3) * h, 0.99**3 * square + (1 - 0.99**3) * h**2
    wanted = mean / (1 - 0.9**6) / ((square / (1 - 0.99**6)).sqrt() + 1e-8)
    torch.testing.assert_close(adamw.update(h, 3), wanted)


def test_own_gradients_of_no_weight_keep_the_momentum(unrounded):
    common = Common(Setting(2, averages="replay", own=0.0), TASKS["gpt"], torch.zeros(1, 2, 6))
    weights, average, rates = torch.zeros(1, 6), torch.randn(1, 6), torch.full((1, 1), 0.1)
    common.step(weights, average, rates, torch.tensor(0.0))
    for _ in range(3):
        moved = common.update(torch.randn(1, 2, 6))
        assert torch.equal(moved, average.sign()[:, None].expand_as(moved))


@pytest.mark.parametrize(
    "wrong",
    [{"averages": "twice"}, {"own": 1.0}, {"averages": "once", "others": 2}]
    + [{"averages": "once", "optimizer": "adamw"}],
    ids=str,
)
def test_averages_that_cannot_be_are_refused(wrong):
    with pytest.raises(ValueError, match="averages"):
        Setting(**wrong)


@pytest.mark.parametrize("power", [0, 1])
def test_averages_come_after_equal_shares_of_the_rate(power):
    task, setting = TASKS["gpt"], Setting(period=5, power=power)
    found = sorted(training.exchanges(task, setting))
    assert found[-1] == task.steps - 1 and abs(len(found) - task.steps / 5) <= 1
    gaps = [later - before for before, later in pairwise(found)]
    early, late = gaps[:20], gaps[-20:]
    if power:
        assert max(early) < 5 < min(late)
    else:
        assert found == list(range(4, task.steps, 5))


def test_a_period_too_short_for_its_power_is_refused():
    with pytest.raises(ValueError, match="period 1 is too short for power 1"):
        training.exchanges(TASKS["gpt"], Setting(period=1, power=1))


def test_averages_move_the_weights_as_torchs_sgd_does():
    start, means = torch.randn(7), torch.randn(4, 7)
    common, velocity = start.clone(), torch.zeros(7)
    wanted = torch.nn.Parameter(start.clone())
    outer = torch.optim.SGD([wanted], lr=0.7, momentum=0.6, nesterov=True)
    for mean in means:
        training.move(common, velocity, mean, 0.7, 0.6)
        wanted.grad = -mean
        outer.step()
    torch.testing.assert_close(common, wanted.detach())


def test_different_trainings_are_not_one_batch(folder):
    with pytest.raises(ValueError, match="differ in rate and seed only"):
        simulate(folder, Setting(2), Setting(4))
    with pytest.raises(ValueError, match="4 windows cannot be divided among 3 ranks"):
        simulate(folder, Setting(3))


def torch_optimizers(model, kind, rate):
    """As nanoGPT's program and a user of Muon set them."""
    hidden, named = set(models.hidden_matrices(model)), dict(model.named_parameters())
    if kind == "adamw":
        hidden = set()
    others = [p for name, p in named.items() if name not in hidden]
    groups = [{"params": [p for p in others if (p.dim() >= 2) is is_decayed]} for is_decayed in (True, False)]
    groups[1]["weight_decay"] = 0.0
    muon = [p for name, p in named.items() if name in hidden]
    adjusted = {"weight_decay": 0.1, "adjust_lr_fn": "match_rms_adamw"}
    return [
        torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.99), weight_decay=0.1),
        *([torch.optim.Muon(muon, lr=rate, **adjusted)] if muon else []),
    ]


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_dense_training_of_nanogpt_is_that_of_torchs_optimizers(kind, folder, unrounded):
    task, peak = TASKS["nanogpt"], 1e-2
    source = task.text(folder)
    torch.manual_seed(5)
    model = task.build()
    optimizers, norms = torch_optimizers(model, kind, peak), []
    for step, (inputs, targets) in zip(range(task.steps), source.train_batches(4, 0, 1, 5, 0), strict=False):
        model.zero_grad()
        F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = task.rate(step, peak)
            optimizer.step()
    assert max(norms) > 1  # was clipped
    with torch.no_grad():
        scores = [
            F.cross_entropy(model(x).flatten(0, 1), y.flatten()) * len(x) for x, y in source.test_batches(2, 0, 1)
        ]
    wanted = float(sum(scores)) / sum(len(x) for x, _ in source.test_batches(2, 0, 1))
    dense = Setting(1, peak, period=1, bits=0, task="nanogpt", optimizer=kind, seed=5)
    assert simulate(folder, dense) == [pytest.approx(wanted, rel=LEAST / 100)]


def test_the_rate_of_nanogpt_ends_at_a_tenth_and_that_of_the_gpt_at_0():
    for name, end in (("nanogpt", 0.1), ("gpt", 0.0)):
        task = TASKS[name]
        assert task.rate(task.steps, 2.0) == pytest.approx(2 * end)
        assert task.rate(task.warm_up, 2.0) == 2.0 and task.rate(0, 2.0) == pytest.approx(2 / 101)


def test_a_stored_text_is_that_of_the_standard_library(tmp_path):
    text.store_library(tmp_path)
    stored, running = TASKS["gpt"].text(tmp_path), TASKS["gpt"].text(None)
    assert torch.equal(stored.train, running.train) and torch.equal(stored.held_out, running.held_out)
    with pytest.raises(FileNotFoundError, match="write-text"):
        TASKS["gpt"].text(tmp_path / "none")


def test_bytes_are_those_of_the_bits_that_each_part_has_in_a_step():
    assert tables.fewer_bytes(Setting()) == pytest.approx(32 / (2 / 3))
    assert tables.fewer_bytes(Setting(period=1, bits=0, others=0)) == 1
    assert tables.fewer_bytes(Setting(period=5, bits=1)) == pytest.approx(160)
    assert tables.fewer_bytes(Setting(period=5, bits=1, finer=1)) == pytest.approx(160 / 1.5)
    # An eighth of the parameters are the others: 31,200 of 252,384.
    mixed = 32 * 252_384 / (221_184 * 2 / 3 + 31_200 * 8)
    assert tables.fewer_bytes(Setting(others=8)) == pytest.approx(mixed)


def test_the_best_rate_is_that_of_the_lowest_mean_of_all_seeds():
    runs = {Setting(rate=3e-3, seed=seed): 2.0 + 0.1 * seed for seed in range(3)}
    runs |= {Setting(rate=4.5e-3, seed=seed): 1.0 for seed in range(2)}
    runs |= {Setting(rate=6e-3, seed=seed): 1.9 if seed else math.nan for seed in range(3)}
    assert tables.best(runs, Setting(), tables.RATES) == tables.Best(3e-3, pytest.approx(2.1), pytest.approx(0.1))
    assert tables.best({}, Setting(), tables.RATES) is None


def test_every_table_shows_all_of_its_runs():
    for name, table in tables.TABLES.items():
        assert not any("+" in cell for row in table.rows({}) for cell in row.values())
        runs = {setting: 1.0 for setting in table.settings}
        empty = [row for row in table.rows(runs) if "-" in row.values()]
        if name == "rates":
            assert len(empty) == len(tables.APART)
            assert all(row["0.002" if "dense" not in row.values() else "0.009"] == "-" for row in empty)
        elif name == "ranks":
            shown = [row[training] for row in table.rows(runs) for training in tables.ON_RANKS]
            assert sum(cell != "-" for cell in shown) == sum(map(len, tables.SENT.values()))
        else:
            assert not empty
        shown = table.rows(runs)
        for setting in table.settings:
            assert table.rows({**runs, setting: 3.0}) != shown or table.rows({**runs, setting: 0.3}) != shown


def test_a_batch_has_runs_that_differ_in_rate_and_seed_only():
    settings = [s for table in tables.TABLES.values() for s in table.settings]
    batches = ranks_apart.batched(settings, 64)
    assert sorted(map(str, (s for batch in batches for s in batch))) == sorted(map(str, set(settings)))
    for batch in batches:
        assert len({replace(s, rate=0.0, seed=0) for s in batch}) == 1 and len(batch) * batch[0].ranks <= 64
    assert all(len(batch) == 1 for batch in ranks_apart.batched(settings, 1))


def test_runs_that_are_not_stored_are_appended(folder, monkeypatch, capsys):
    monkeypatch.setitem(tables.TABLES, "apart", replace(tables.TABLES["apart"], settings=[Setting(2), Setting(4)]))
    file = folder / "new" / "runs.jsonl"
    command = ["ranks_apart.py", "--results", str(file), "--data-dir", str(folder)]
    for share, count in (("1/2", 1), ("1/2", 1), ("0/1", 2)):
        monkeypatch.setattr("sys.argv", [*command, "--train", "--share", share])
        ranks_apart.main()
        assert len(file.read_text().splitlines()) == count == len(ranks_apart.read(file))
    line = json.loads(file.read_text().splitlines()[0])
    assert line["setting"] == asdict(Setting(4)) and line["bits_per_byte"] == ranks_apart.read(file)[Setting(4)]
    monkeypatch.setattr("sys.argv", [*command, "--plan"])
    ranks_apart.main()
    assert capsys.readouterr().out.startswith("0 runs in 0 batches")


def test_a_share_is_one_of_several():
    assert ranks_apart.share("1/4") == (1, 4)
    for wrong in ("4/4", "-1/2", "1"):
        with pytest.raises(ValueError):
            ranks_apart.share(wrong)


def test_lines_without_newer_settings_are_read(tmp_path):
    old = {"ranks": 16, "rate": 0.0045, "period": 3, "bits": 2, "others": None}
    (tmp_path / "runs.jsonl").write_text(json.dumps({"setting": old, "bits_per_byte": 1.5}) + "\n")
    assert ranks_apart.read(tmp_path / "runs.jsonl") == {Setting(): 1.5}


def test_the_documentation_shows_the_stored_runs(monkeypatch, capsys):
    page = PAGE.read_text()
    for name in tables.TABLES:
        if name.startswith("averages"):  # not run yet
            continue
        monkeypatch.setattr("sys.argv", ["ranks_apart.py", "--tables", name])
        ranks_apart.main()
        printed = capsys.readouterr().out
        assert printed.count("\n") > 3 and printed in page, name
