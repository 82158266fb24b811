"""The tables of simulated runs: which runs each has, and its rows."""

import functools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from experiment import models

from simulation.setting import TASKS, Setting

#: Losses, in the metric of each task.
Runs = dict[Setting, float]
Row = dict[str, str]

DENSE = Setting(1, period=1, bits=0)
SEEDS, DENSE_RATES, RATES = (0, 1, 2), (2e-3, 3e-3, 4.5e-3, 6e-3), (3e-3, 4.5e-3, 6e-3, 9e-3)
NANOGPT_RATES, ADAMW_RATES = (1.5e-3, 3e-3, 6e-3, 1.2e-2), (1.2e-2, 2.4e-2, 4.8e-2)


def repeated(setting: Setting, rates: Sequence[float], seeds: Sequence[int] = SEEDS) -> list[Setting]:
    return [replace(setting, rate=rate, seed=seed) for rate, seed in product(rates, seeds)]


@dataclass(frozen=True)
class Best:
    """The mean over seeds at the learning rate where it is lowest."""

    rate: float
    mean: float
    half_range: float


def at(runs: Runs, setting: Setting, rate: float, seeds: Sequence[int] = SEEDS) -> Best | None:
    """None unless all seeds are stored; a run that diverged has an infinite loss."""
    values = [runs.get(s) for s in repeated(setting, (rate,), seeds)]
    known = [math.inf if math.isnan(value) else value for value in values if value is not None]
    if len(known) < len(values):
        return None
    return Best(rate, statistics.fmean(known), (max(known) - min(known)) / 2 if math.isfinite(max(known)) else 0.0)


def best(runs: Runs, setting: Setting, rates: Sequence[float], seeds: Sequence[int] = SEEDS) -> Best | None:
    """Of the rates of which all seeds are stored."""
    found = [one for rate in rates if (one := at(runs, setting, rate, seeds))]
    return min(found, key=lambda one: one.mean) if found else None


def over(value: Best | None, dense: Best | None) -> str:
    return "-" if value is None or dense is None else f"{value.mean / dense.mean - 1:+.1%}"


APART = (
    (DENSE, DENSE_RATES),
    *(
        (setting, RATES)
        for setting in (
            Setting(period=1, bits=0),
            Setting(period=1, bits=0, others=0),
            Setting(),
            Setting(period=2),
            Setting(others=2),
            Setting(period=4, bits=1, finer=1, others=2),
            Setting(period=4, bits=1, finer=1, others=2, power=1),
            Setting(others=8),
            Setting(32, others=8, restore_length=True),
        )
    ),
)


def apart_rows(runs: Runs) -> list[Row]:
    """Each at its best learning rate: the mean of the seeds ± half of their range."""
    dense, lines = best(runs, DENSE, DENSE_RATES), []
    for setting, rates in APART:
        value = best(runs, setting, rates)
        line = {"what is sent": title(setting), "ranks": str(setting.ranks)}
        line["fewer bytes"] = f"{fewer_bytes(setting):.0f}"
        line["learning rate"] = "-" if value is None else f"{value.rate:g}"
        line["bits per byte"] = "-" if value is None else f"{value.mean:.3f} ± {value.half_range:.3f}"
        line["over dense"] = over(value, dense)
        lines.append(line)
    return lines


def rates_rows(runs: Runs) -> list[Row]:
    """At every learning rate: the mean of the seeds that are stored, whose number follows in brackets."""
    lines = []
    for setting, _ in APART:
        line = {"what is sent": title(setting), "ranks": str(setting.ranks)}
        for rate in sorted({*DENSE_RATES, *RATES}):
            found = [runs[s] for s in repeated(setting, (rate,)) if s in runs]
            line[f"{rate:g}"] = f"{statistics.fmean(found):.3f} ({len(found)})" if found else "-"
        lines.append(line)
    return lines


#: Trainings, simulated with one seed, and their learning rates.
ON_RANKS = {
    "gpt, 4 ranks": (Setting(4), RATES),
    "gpt, 16 ranks": (Setting(16), RATES),
    "gpt, 32 ranks": (Setting(32), RATES),
    "nanogpt, 4 ranks": (Setting(4, task="nanogpt"), NANOGPT_RATES),
    "nanogpt, 16 ranks": (Setting(16, task="nanogpt", windows=16), NANOGPT_RATES),
}
GPT_4, GPT_16, GPT_32, NANOGPT_4, NANOGPT_16 = ON_RANKS
#: What is sent, and in which of these trainings.
SENT = {
    Setting(): (GPT_4, GPT_16, NANOGPT_4, NANOGPT_16),
    Setting(restore_length=True): (GPT_4, GPT_16, NANOGPT_4, NANOGPT_16),
    Setting(others=8): (GPT_4, GPT_16, GPT_32, NANOGPT_4),
    Setting(others=8, restore_length=True): (GPT_4, GPT_16, GPT_32, NANOGPT_16),
    Setting(period=4, bits=1, finer=1, others=2): (GPT_16,),
    Setting(period=4, bits=1, finer=1, others=2, restore_length=True): (GPT_16, GPT_32),
    Setting(period=2, bits=1, finer=1): (GPT_4,),
    Setting(period=5, bits=0): (GPT_4,),
    Setting(period=5, bits=1): (GPT_4, GPT_16),
    Setting(period=5, bits=1, finer=1): (GPT_4,),
    Setting(period=8, bits=1, finer=1): (GPT_4, NANOGPT_4),
    Setting(period=8, bits=1, finer=1, power=1): (GPT_4,),
    Setting(period=15, bits=0): (GPT_4,),
    Setting(period=15, bits=1): (GPT_4, GPT_16),
    Setting(period=15, bits=1, power=1): (GPT_4,),
    Setting(period=15, bits=1, outer_rate=0.7, outer_momentum=0.5): (GPT_4,),
    Setting(period=22, bits=1, finer=1): (GPT_4,),
}


def dense(training: Setting) -> Setting:
    return replace(training, ranks=1, period=1, bits=0)


def sent(setting: Setting, training: Setting) -> Setting:
    return replace(setting, ranks=training.ranks, task=training.task, windows=training.windows)


def ranks_rows(runs: Runs) -> list[Row]:
    """With seed 0, over dense training, both at their best learning rate, which follows in brackets."""
    lines = []
    for setting in SENT:
        line = {"what is sent": title(setting), "fewer bytes": f"{fewer_bytes(setting):.0f}"}
        for name, (training, rates) in ON_RANKS.items():
            reference = best(runs, dense(training), dense_rates(training), (0,))
            value = best(runs, sent(setting, training), rates, (0,))
            line[name] = over(value, reference) + (f" ({value.rate:g})" if value and reference else "")
        lines.append(line)
    return lines


def dense_rates(training: Setting) -> Sequence[float]:
    return DENSE_RATES if training.task == "gpt" else NANOGPT_RATES


def ranks_settings() -> list[Setting]:
    found = []
    for training, _ in ON_RANKS.values():
        found += repeated(dense(training), dense_rates(training), (0,))
    for setting, names in SENT.items():
        for training, rates in map(ON_RANKS.__getitem__, names):
            found += repeated(sent(setting, training), rates, (0,))
    return list(dict.fromkeys(found))


@dataclass(frozen=True)
class Transfer:
    """Trainings on ``ranks`` at learning rates around ``rate``, dense training's best."""

    task: str
    optimizer: str
    ranks: int
    rate: float
    seeds: tuple[int, ...]
    windows: int | None = None

    @property
    def rates(self) -> list[float]:
        return [self.rate * factor for factor in (0.25, 0.5, 1, 2)]

    @property
    def columns(self) -> dict[str, Setting]:
        local = Setting(self.ranks, task=self.task, optimizer=self.optimizer, windows=self.windows)
        return {
            "dense": dense(local),
            "low_bit": local,
            "restored length": replace(local, restore_length=True),
            "others in 8 bits": replace(local, others=8),
            "both": replace(local, others=8, restore_length=True),
        }


TRANSFERS = (
    Transfer("gpt", "muon", 4, 3e-3, (0,)),
    Transfer("gpt", "muon", 16, 3e-3, (0,)),
    Transfer("nanogpt", "muon", 4, 6e-3, (0, 1)),
    Transfer("nanogpt", "muon", 16, 6e-3, (0,), windows=16),
    Transfer("nanogpt", "adamw", 4, 3e-3, (0,)),
)


def transfer_rows(runs: Runs) -> list[Row]:
    """The loss of dense training, and what the others have over it at the same learning rate."""
    lines = []
    for transfer in TRANSFERS:
        for rate in transfer.rates:
            line = {"training": f"{transfer.task}, {transfer.optimizer}, {transfer.ranks} ranks"}
            line["learning rate"] = f"{rate:g}"
            values = {name: at(runs, s, rate, transfer.seeds) for name, s in transfer.columns.items()}
            reference = values.pop("dense")
            line["dense"] = "-" if reference is None else f"{reference.mean:.3f}"
            lines.append(line | {name: over(value, reference) for name, value in values.items()})
    return lines


def transfer_settings() -> list[Setting]:
    return [run for t in TRANSFERS for setting in t.columns.values() for run in repeated(setting, t.rates, t.seeds)]


#: Whose scaling is shown, simulated with one seed: learners that divide one batch, as in exo gym's of DiLoCo.
LEARNERS = {
    "Muon, low_bit": Setting(),
    "AdamW, DiLoCo": Setting(period=30, bits=0, optimizer="adamw", outer_rate=0.7, outer_momentum=0.9),
}
COUNTS, LEARNER_RATES = (1, 2, 4, 8, 16), (7.5e-4, 1.5e-3, 3e-3, 4.5e-3, 6e-3)


def learners(setting: Setting, count: int) -> Setting:
    """One learner: dense training."""
    return replace(setting, ranks=count) if count > 1 else replace(DENSE, optimizer=setting.optimizer)


def learners_rows(runs: Runs) -> list[Row]:
    """Losses at the best learning rate, which follows in brackets."""
    lines = []
    for name, setting in LEARNERS.items():
        line = {"learners": name, "fewer bytes": f"{fewer_bytes(setting):.0f}"}
        for count in COUNTS:
            value = best(runs, learners(setting, count), LEARNER_RATES, (0,))
            line[str(count)] = "-" if value is None else f"{value.mean:.3f} ({value.rate:g})"
        lines.append(line)
    return lines


#: Trainings in which the others move by averages of summed gradients, and their learning rates.
AVERAGED = {
    "gpt, 16 ranks": (Setting(16), RATES),
    "gpt, 4 ranks": (Setting(4), RATES),
    "gpt, 32 ranks": (Setting(32), RATES),
    "nanogpt, 16 ranks": (Setting(16, task="nanogpt", windows=16), NANOGPT_RATES[1:]),
    "nanogpt, 4 ranks": (Setting(4, task="nanogpt"), NANOGPT_RATES),
    "gpt-adamw, 16 ranks": (Setting(16, task="gpt-adamw"), ADAMW_RATES),
    "gpt-adamw, 4 ranks": (Setting(4, task="gpt-adamw"), ADAMW_RATES),
}
AVERAGED_DENSE_RATES = {"gpt": (1.5e-3, *DENSE_RATES), "nanogpt": NANOGPT_RATES, "gpt-adamw": (6e-3, *ADAMW_RATES)}


def averaged(form: str, power: float | None = None, **others: Any) -> Callable[[Setting], Setting]:
    """Of a training: with averages of this form and ``own`` its ranks to this power; None: nothing in between."""
    return lambda t: replace(t, averages=form, own=None if power is None else t.ranks**power, **others)


#: What the others do, of a training; the most important first.
FORMS: dict[str, Callable[[Setting], Setting]] = {
    "once": averaged("once"),
    "replay, own": averaged("replay", 0),
    "replay, blend": averaged("replay", -0.5),
    "once, length restored": averaged("once", restore_length=True),
    "replay, blend, length restored": averaged("replay", -0.5, restore_length=True),
    "local": lambda t: t,
    "once, blend": averaged("once", -0.5),
    "local, length restored": lambda t: replace(t, restore_length=True),
    "replay, 1/ranks": averaged("replay", -1),
    "replay, nothing": averaged("replay"),
}
FIRST, MORE = [*FORMS][:7], [*FORMS][7:]
#: Those of which there are three seeds.
SEEDED = ("once", "replay, own", "replay, blend", "local")
PERIODS, PERIOD_FORMS = (2, 8, 5), ("once", "replay, own", "replay, blend", "local")


def averages_settings(seeds: Sequence[int], forms: Sequence[str]) -> list[Setting]:
    """The most important first; dense runs after the first form."""
    found = []
    for form in forms:
        for training, rates in AVERAGED.values():
            found += repeated(FORMS[form](training), rates, seeds)
        if form == forms[0]:
            for training, _ in AVERAGED.values():
                found += repeated(dense(training), AVERAGED_DENSE_RATES[training.task], seeds)
    if len(seeds) > 1:
        found.sort(key=lambda s: s.task == "nanogpt")  # takes longest
    return list(dict.fromkeys(found))


def averages_rows(runs: Runs, seeds: Sequence[int], forms: Sequence[str]) -> list[Row]:
    """Each at its best learning rate, over dense training at its own best: the mean of the seeds ± half of their
    range. ``at dense's rate``: both at the best rate of dense training of those that the form has."""
    lines = []
    for name, (training, rates) in AVERAGED.items():
        dense_best = best(runs, dense(training), AVERAGED_DENSE_RATES[training.task], seeds)
        usual = best(runs, dense(training), [r for r in rates if r in AVERAGED_DENSE_RATES[training.task]], seeds)
        for form in forms:
            value = best(runs, FORMS[form](training), rates, seeds)
            there = at(runs, FORMS[form](training), usual.rate, seeds) if usual else None
            line = {"training": name, "others": form}
            line["learning rate"] = "-" if value is None else f"{value.rate:g}"
            line["loss"] = "-" if value is None else f"{value.mean:.3f} ± {value.half_range:.3f}"
            line["over dense"] = over(value, dense_best)
            line["at dense's rate"] = over(there, usual)
            lines.append(line)
    return lines


def periods_settings() -> list[Setting]:
    return [run for period, form in product(PERIODS, PERIOD_FORMS) for run in _of_period(period, form)]


def _of_period(period: int, form: str) -> list[Setting]:
    trainings = (AVERAGED[name] for name in ("gpt, 16 ranks", "gpt, 4 ranks"))
    return [s for t, rates in trainings for s in repeated(replace(FORMS[form](t), period=period), rates, (0,))]


def periods_rows(runs: Runs) -> list[Row]:
    """With seed 0, the loss of each at its best learning rate, which follows in brackets."""
    lines = []
    for name, form in product(("gpt, 16 ranks", "gpt, 4 ranks"), PERIOD_FORMS):
        training, rates = AVERAGED[name]
        line = {"training": name, "others": form}
        for period in PERIODS:
            value = best(runs, replace(FORMS[form](training), period=period), rates, (0,))
            line[f"period {period}"] = "-" if value is None else f"{value.mean:.3f} ({value.rate:g})"
        lines.append(line)
    return lines


@dataclass(frozen=True)
class Table:
    settings: Sequence[Setting]
    rows: Callable[[Runs], list[Row]]


_APART_RUNS = [run for setting, rates in APART for run in repeated(setting, rates)]
#: The most important first.
TABLES = {
    "apart": Table(_APART_RUNS, apart_rows),
    "rates": Table(_APART_RUNS, rates_rows),
    "transfer": Table(transfer_settings(), transfer_rows),
    "ranks": Table(ranks_settings(), ranks_rows),
    "learners": Table(
        [run for s, n in product(LEARNERS.values(), COUNTS) for run in repeated(learners(s, n), LEARNER_RATES, (0,))],
        learners_rows,
    ),
    "averages": Table(averages_settings((0,), FIRST), lambda runs: averages_rows(runs, (0,), FIRST)),
    "averages-seeds": Table(averages_settings(SEEDS, SEEDED), lambda runs: averages_rows(runs, SEEDS, SEEDED)),
    "averages-more": Table(averages_settings((0,), MORE), lambda runs: averages_rows(runs, (0,), MORE)),
    "averages-periods": Table(periods_settings(), periods_rows),
}


@functools.cache
def fewer_bytes(setting: Setting) -> float:
    """Times fewer than dense training sends; scales and tensors that are not compressed count as if they were."""
    model = TASKS[setting.task].build()
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    matrices = sum(sizes[name] for name in models.hidden_matrices(model))
    rest = sum(sizes.values()) - matrices
    local = both_ways(setting.bits, setting.finer) / setting.period
    every = local if setting.others is None else both_ways(setting.others, setting.finer)
    return 32 * (matrices + rest) / (matrices * local + rest * every)


def both_ways(bits: int, finer: int) -> float:
    """Bits of an entry, the mean of those to its owner and those from it."""
    return bits + finer / 2 if bits else 32


def title(setting: Setting) -> str:
    if setting.ranks == 1:
        return "dense"
    local = f"every {setting.period} steps" if setting.period > 1 else "every step"
    local += ", fewer at the end," * bool(setting.power)
    local += f" in {values(setting.bits, setting.finer)}"
    local += ", length restored" * setting.restore_length
    if setting.outer_momentum:
        local += f", outer rate {setting.outer_rate:g} and momentum {setting.outer_momentum:g}"
    if setting.averages:
        own = "stand still" if setting.own is None else f"move by own gradients x {setting.own:g}"
        return f"matrices {local}; summed gradients of the others, which {own} meanwhile: {setting.averages}"
    if setting.others is None:
        return f"weights {local}"
    return f"matrices {local}; gradients of the others in {values(setting.others, setting.finer)}"


def values(bits: int, finer: int) -> str:
    """As "1/2 bits" for the ranks' own values in 1 bit, their means in 2."""
    if not bits:
        return "float32"
    return f"{bits}{f'/{bits + finer}' * bool(finer)} bit{'s' * (bits + finer > 1)}"
