#!/usr/bin/env python3
"""List the figures that README and the pages state, each with the stored runs it is from and what these give.

    stated.py           a line each; the exit status is 1 if one is not what was measured (tests/docs/test_stated.py)
    stated.py --write   docs/results/stated.md: the same with the ring and the day of the newest code that it is from

Other figures of simulations are compared with docs/results/ranks-apart, tables that scripts write with these
scripts, by other tests. "Printed only" on a page says that there is no file.
"""

import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import figures
import nanogpt
import ranks_apart
import table
from experiment.files import script_parser
from experiment.result_file import Result, read_lines
from rings import Row
from simulation.setting import Setting

ROOT = Path(__file__).resolve().parents[2]
PAGE = figures.RESULTS / "stated.md"
HEAD = """# Figures that the pages state

Each with the stored runs that it is from, the ring on which they exchanged (nothing where they used none), and the day
of their code, the newest of several commits. Written by `.venv/bin/python scripts/experiments/stated.py --write`.

"""


#: Keys of a run's quality.
QUALITIES = ("test_bits_per_byte", "test_accuracy", "val_loss")


@dataclass(frozen=True)
class Source:
    """Stored runs, and what they give."""

    runs: str
    value: float
    of: tuple[Row, ...] = field(default=(), repr=False)

    @property
    def ring(self) -> str:
        """The rings of the runs, as "A" or "A, C"."""
        return ", ".join(sorted({row.ring for row in self.of} - {""}))

    @property
    def date(self) -> str:
        """The day of the newest code."""
        return max(row.date for row in self.of)


def quality(experiment: str, *names: str) -> Source:
    """Returns the mean over runs and their seeds: NAME, or NAME-0, NAME-1, NAME-2; OTHER/NAME of another experiment."""
    rows = list[Row]()
    for given in names:
        folder, _, name = given.rpartition("/")
        runs = figures.read(figures.RESULTS, folder or experiment)
        seeds = [run for key, run in runs.items() if key in (name, *(f"{name}-{seed}" for seed in range(3)))]
        rows += [_row(folder or experiment, run) for run in seeds]
    found = [next(row.run[key] for key in QUALITIES if key in row.run) for row in rows]
    return Source(
        f"{experiment}: {', '.join(names)}, {len(found)} run{'s' * (len(found) > 1)}",
        sum(found) / len(found),
        tuple(rows),
    )


def over(one: Source, other: Source) -> Source:
    """Returns by how many per cent the first is larger."""
    return Source(f"{one.runs}, over {other.runs}", 100 * (one.value / other.value - 1), one.of + other.of)


def below(one: Source, other: Source) -> Source:
    """Returns by how many per cent the first is smaller."""
    return Source(f"{one.runs}, below {other.runs}", 100 * (1 - one.value / other.value), one.of + other.of)


def fewer(experiment: str, name: str) -> Source:
    """Returns how many times fewer bytes a run sent."""
    run = figures.read(figures.RESULTS, experiment)[name]
    return Source(f"{experiment}: {name}", run["wire_ratio"], (_row(experiment, run),))


def of_rows(experiment: str, rate: str, method: str, key: str = "step_ms", scale: float = 1.0) -> Source:
    """Returns a figure of the row of a link and a method: milliseconds, or another one."""
    runs = figures.read(figures.RESULTS, experiment).values()
    (found,) = [(row, run) for run in runs for row in run["rows"] if (row["rate"], row["method"]) == (rate, method)]
    return Source(f"{experiment}: {method} at {rate}", found[0][key] * scale, (Row(experiment, found[1], method),))


def memory(method: str, key: str) -> Source:
    """Returns bytes a parameter, "held" or at the "peak", on 4 ranks with 25 M parameters."""
    run = figures.read(figures.RESULTS, "memory")[method]
    (found,) = [row for row in run["rows"] if (row["millions"], row["ranks"]) == (25, 4)]
    return Source(f"memory: {method}", found[key], (Row("memory", run, method),))


def times(one: Source, other: Source) -> Source:
    """Returns how many times the second fits into the first."""
    return Source(f"{one.runs} / {other.runs}", one.value / other.value, one.of + other.of)


def race(place: str, method: str) -> Source:
    """Returns seconds."""
    target, link = place.split(", ")
    (experiment,) = [folder for folder, (about, _) in figures.RACES.items() if about == target]
    rate, name = (_key(labels, label) for labels, label in ((figures.LINKS, link), (figures.RACERS, method)))
    run = figures.read(figures.RESULTS, experiment)[f"{rate}-{name}-mpi"]
    seconds = figures.races(figures.RESULTS).loc[f"{target}\n{link}", method]
    return Source(f"race of {place}: {method}", seconds, (_row(experiment, run),))


def simulated(seeds: Sequence[int] = (0, 1, 2), experiment: str = "ranks-apart", **setting: Any) -> Source:
    """Returns the mean loss of simulations of ranks_apart.py, or loss_by_size.py."""
    file = figures.RESULTS / experiment / "runs.jsonl"
    wanted, losses = [Setting(**setting, seed=seed) for seed in seeds], ranks_apart.read(file)
    runs = [run for run in read_lines(file) if Setting(**run["setting"]) in wanted]
    mean = sum(losses[one] for one in wanted) / len(wanted)
    named = f"{experiment}: {setting}, {len(wanted)} run{'s' * (len(wanted) > 1)}"
    return Source(named, mean, tuple(Row(experiment, run, "") for run in runs))


def by_size(task: str = "gpt-0.3m-20", ranks: int = 4, **setting: Any) -> Source:
    """Returns the loss of a simulation of loss_by_size.py."""
    common = {"task": task, "ranks": ranks, "restore_length": ranks > 1}
    return simulated([0], "loss-by-size", **common, **setting)


#: What a simulated run sends: dense training, and 164 times fewer bytes.
ALONE, FEWER = {"ranks": 1, "period": 1, "bits": 0}, {"period": 8, "bits": 1, "finer": 1}


def beside_adamw(rate: float, ranks: int = 16, **setting: Any) -> Source:
    """Returns the loss of a simulation of ranks_apart.py of Muon beside AdamW."""
    return simulated([0], task="gpt-adamw", ranks=ranks, rate=rate, restore_length=ranks > 1, **setting)


def _row(experiment: str, run: Result) -> Row:
    return Row(experiment, run, run["config"]["compression"])


def nanogpts() -> Iterator[tuple[str, str, Source]]:
    """The losses of the table of nanogpt.py, each with the text around it."""
    for variant, row in zip(nanogpt.VARIANTS, nanogpt.rows(figures.read(figures.RESULTS, "nanogpt")), strict=True):
        before = "|"
        for rate, cell in row.items():
            if cell and before != "|":
                _, space, rest = cell.partition(" ")
                yield "results", f"{before} {{}}{space}{rest} |", quality("nanogpt", f"{variant}-{rate}")
            before += f" {cell} |" if cell else " |"


def _key(labels: dict[str, str], label: str) -> str:
    return next(key for key, found in labels.items() if found == label)


DENSE, ADAMW = quality("gpt-muon", "none@muon-3e-3"), quality("gpt-adamw", "none-6e-3")
RECIPE_DENSE, RECIPE = quality("gpt-recipe", "none@muon-adamw-2.4e-2"), quality("gpt-recipe", "quantized@recipe-1.2e-2")
LOW_BIT, EIGHT = quality("gpt-muon", "quantized@45-6e-3"), quality("gpt-muon", "quantized@170-4.5e-3")
SIXTEEN = quality("gpt-muon", "quantized@500-decay-3e-3")
RANKS_16, RANKS_32 = quality("gpt-muon-ranks", "quantized@45-6e-3"), quality("gpt-muon-ranks/32", "quantized@45-6e-3")
EIGHT_16 = quality("gpt-muon-ranks", "quantized@170-6e-3")
ADAMW_LOCAL, ADAMW_8 = quality("gpt-muon", "quantized@adamw-45-3e-3"), quality("gpt-adamw", "quantized@8bits-6e-3")
DEMO = quality("demo-ring", "demo-matrices-1of45-6e-3")
TUNED, TUNED_DENSE = quality("gpt-tune", "quantized@local-3e-3"), quality("gpt-tune", "none-3e-3")
CIFAR = quality("cifar10-signs/10", "none-0.3", "cifar10/none")
CIFAR_DEMO = quality("cifar10-signs/10", "demo@orthogonal-1of64-6e-3")
PAUSES = {"10 Gbit/s, 100 ms": "10gbit", "1 Gbit/s, 100 ms": "1gbit", "100 Mbit/s, 350 ms": "100mbit"}
FP16 = {rate: of_rows("exchange-pause", rate, "fp16") for rate in PAUSES.values()}
FEW = {rate: of_rows("exchange-pause", rate, "ddp-quantized@few") for rate in FP16}
DELAY = {rate: of_rows("exchange-pause", rate, "ddp-quantized@delay") for rate in FP16}
LATE = {rate: of_rows("exchange-pause", rate, "ddp-quantized@late") for rate in FP16}

#: Methods of exchange-hsdp, and how the page calls them.
HSDP = {
    "native": "native",
    "native-bf16": "native, reduced in bfloat16",
    "demo": "DeMo (ring A)",
    "iwp": "IWP",
    "low_bit": "`recipes.low_bit`, SGD (ring A)",
}

#: How the rows of methods end in the table of methods.md, before their memory; of the second ones, with and without
#: momentum.
MEMORY = {
    "low_bit": "in 2 bits, with error feedback | no | 2",
    "diloco": "in float32 | no | 2",
    "sparseloco": "differences of weights | yes | 2",
    "Quantized": "(measured: 4), with error feedback | no | 2",
    "DeMo": "rank's momentum | no | 3",
    "PowerSGD": "gradient matrix | no | 4",
    "DGC": "the same, with momentum | yes | 2",
    "QSGD": "rounded at random | yes | 2",
    "TernGrad": "0 or s | slightly | 3",
    "NoCompression": "or float16 | no | 2",
}
MEMORY_WITH_MOMENTUM = {
    "IWP": "random leaders | no | 3",
    "FFT": "Fourier coefficients | no | 3",
    "MIPD": "to be significant; no indices | no | 3",
    "SlimDP": "random others; no indices | no | 3",
    "MP2": "predicts the others; no indices | no | 3",
    "TopK": "own largest entries | yes | 2",
}

NANOGPT, NANOGPT_TWICE, NANOGPT_AVERAGED = (
    over(quality("nanogpt", name), quality("nanogpt", "dense-6e-3"))
    for name in ("low_bit-6e-3", "low_bit-1.2e-2", "averaged-6e-3")
)
ON_16: dict[str, Any] = {"rate": 6e-3, "task": "nanogpt", "windows": 16}
NANOGPT_DENSE = simulated([0], **ALONE, **ON_16)
NANOGPT_ONCE = simulated([0], averages="once", **ON_16)
NANOGPT_RESTORED = simulated([0], averages="once", restore_length=True, **ON_16)
SIZES = "gpt-0.3m-20", "gpt-1m-20", "gpt-2m-20"
LITTLE_TEXT, MORE_TEXT, MOST_TEXT, LITTLE_TEXT_FEWER, MORE_TEXT_FEWER, MOST_TEXT_FEWER = (
    over(by_size(task, **bits, rate=4e-3), by_size(task, **ALONE, rate=2e-3)) for bits in ({}, FEWER) for task in SIZES
)
ONCE, SIMULATED_DENSE = simulated(averages="once", rate=6e-3), simulated(**ALONE, rate=4.5e-3)

#: Page, words in which {} stands for the figure and … for any other one, source.
STATED: list[tuple[str, str, Source]] = [
    ("README", "bits per byte {}, dense", RECIPE),
    ("README", "dense {}: +", RECIPE_DENSE),
    ("README", "dense 1.861: +{} %", over(RECIPE, RECIPE_DENSE)),
    ("README", "+{} %, +5.9 %", over(RANKS_16, DENSE)),
    ("README", "+3.3 %, +{} %", over(RANKS_32, DENSE)),
    ("README", "+{} %; DeMo in", over(ADAMW_LOCAL, ADAMW)),
    ("README", "place -{} %", below(DEMO, ADAMW)),
    ("README", "accuracy {}, dense 0.885", TUNED),
    ("README", "0.886, dense {}", TUNED_DENSE),
    ("README", "accuracy {}, dense 0.8410", CIFAR_DEMO),
    ("README", "0.8428, dense {}", CIFAR),
    ("README", "| `low_bit` | {} |", fewer("gpt-muon", "quantized@45-6e-3-0")),
    ("README", "mean_bits=2` | {} |", fewer("gpt-muon", "quantized@170-4.5e-3-0")),
    ("README", "(0.8 M, 4 ranks) lost {} %", NANOGPT),
    ("README", "**Memory** besides weights and gradients: {} bytes", memory("low_bit", "peak")),
    *(
        ("methods", f"{words} | {cells} |", memory(name, key))
        for name, words in MEMORY.items()
        for key, cells in (("held", "{} | …"), ("peak", "… | {}"))
    ),
    *(
        ("methods", f"{words} | {cells} |", memory(name + momentum, key))
        for name, words in MEMORY_WITH_MOMENTUM.items()
        for momentum, key, cells in (
            ("", "held", "{} (…) | … (…)"),
            (", momentum", "held", "… ({}) | … (…)"),
            ("", "peak", "… (…) | {} (…)"),
            (", momentum", "peak", "… (…) | … ({})"),
        )
    ),
    ("choosing", "bits per byte {} % above dense Muon", over(RECIPE, RECIPE_DENSE)),
    ("choosing", "above dense Muon, {} % below dense AdamW", below(RECIPE, ADAMW)),
    ("choosing", "4 real ranks), lost {} %", NANOGPT),
    ("choosing", "(local_steps.md#from-16-ranks-on) {} % (one seed)", NANOGPT_AVERAGED),
    ("choosing", "accuracy {}, dense 0.885", TUNED),
    ("choosing", "accuracy 0.886, dense {} (ring A) |", TUNED_DENSE),
    ("choosing", "DeMo {} % below dense AdamW", below(DEMO, ADAMW)),
    ("choosing", "GPT: {} % above dense AdamW; 0.6 %", over(ADAMW_LOCAL, ADAMW)),
    ("choosing", "above dense AdamW; {} % (one seed each)", over(ADAMW_8, ADAMW)),
    ("choosing", "10 epochs: {}, dense 0.8410 (ring A) |", CIFAR_DEMO),
    ("choosing", "4 epochs: {}, dense", quality("cifar10-budgets", "64-iwp-lanes4")),
    ("choosing", "0.7620, dense {};", quality("cifar10-budgets", "none")),
    ("choosing", "0.7808; 10 epochs: {}, dense", quality("cifar10", "iwp-64")),
    ("choosing", "0.8334, dense {} |", CIFAR),
    ("choosing", "best rate | 47 | {} % |", over(LOW_BIT, DENSE)),
    ("choosing", "best rate | 47 | 0.9 % | {} % |", over(RANKS_16, DENSE)),
    ("choosing", "best rate | 47 | 0.9 % | 3.3 % | {} % (one", over(RANKS_32, DENSE)),
    ("choosing", "mean_bits=2)` | 164 | {} % | 8.5", over(EIGHT, DENSE)),
    ("choosing", "mean_bits=2)` | 164 | 2.6 % | {} % (one", over(EIGHT_16, DENSE)),
    ("choosing", "decay=0.9)` | 482 | {} % | | |", over(SIXTEEN, DENSE)),
    ("choosing", "was {} times as fast as with fp16 at 10 Gbit/s", times(FP16["10gbit"], FEW["10gbit"])),
    ("choosing", "at 10 Gbit/s, {} at 1 Gbit/s", times(FP16["1gbit"], FEW["1gbit"])),
    ("choosing", "at 1 Gbit/s and {} at 100 Mbit/s", times(FP16["100mbit"], FEW["100mbit"])),
    ("choosing", "(local_steps.md#overlap) {},", times(FP16["10gbit"], DELAY["10gbit"])),
    ("choosing", "(local_steps.md#overlap) …, {} and", times(FP16["1gbit"], DELAY["1gbit"])),
    ("choosing", "and {} ([benchmarks](benchmarks.md#behind", times(FP16["100mbit"], DELAY["100mbit"])),
    ("choosing", "ended at {} after 194 steps", quality("race-vgg11", "1gbit-iwp-mpi")),
    ("choosing", "194 steps, dense at {}", quality("race-vgg11", "100mbit-none-mpi")),
    *(
        ("benchmarks", f"| {link} |{before} {{}} ", figure)
        for link, rate in PAUSES.items()
        for before, figure in (
            ("", FP16[rate]),
            (" … |", FEW[rate]),
            (" … | … (…) |", LATE[rate]),
            (" … | … (…) | … (…) |", DELAY[rate]),
            (" … | … (…) | … (…) | … (…) |", times(FP16[rate], FEW[rate])),
            (" … | … (…) | … (…) | … (…) | … |", times(FP16[rate], DELAY[rate])),
        )
    ),
    *(
        ("benchmarks", f"| {label} |{' … |' * place} {{}} |", of_rows("exchange-hsdp", rate, method))
        for method, label in HSDP.items()
        for place, rate in enumerate(("none", "1gbit", "100mbit"))
    ),
    *(
        ("benchmarks", f"| {label} |{' … |' * 3} {{}} |", of_rows("exchange-hsdp", "1gbit", method, "tx_bytes", 1e-6))
        for method, label in HSDP.items()
    ),
    ("benchmarks", "at 100 Mbit/s: FFT {} s,", race("vgg11 to 0.6, 100 Mbit/s", "FFT")),
    ("benchmarks", "270 s, IWP {},", race("vgg11 to 0.6, 100 Mbit/s", "IWP")),
    ("benchmarks", "IWP 344, fp16 {},", race("vgg11 to 0.6, 100 Mbit/s", "fp16")),
    ("benchmarks", "fp16 454, dense {};", race("vgg11 to 0.6, 100 Mbit/s", "dense")),
    ("benchmarks", "100 Mbit/s: fp16 {}, IWP 306", race("resnet20 to 0.7, 100 Mbit/s", "fp16")),
    ("benchmarks", "fp16 288, IWP {}, dense", race("resnet20 to 0.7, 100 Mbit/s", "IWP")),
    ("results", "over dense at its best rate ({})", SIMULATED_DENSE),
    ("results", "{} on 16 ranks at 6e-3", ONCE),
    ("results", "at 6e-3 (+{} %", over(ONCE, SIMULATED_DENSE)),
    ("local_steps", "nanoGPT lost {} % on 4 ranks", NANOGPT),
    ("local_steps", "nanoGPT lost {} % with it", NANOGPT_AVERAGED),
    ("local_steps", "with it and {} % without", NANOGPT),
    ("local_steps", "signs lost {} % with it", over(ONCE, SIMULATED_DENSE)),
    ("local_steps", "with it, `low_bit` {} %, both", over(simulated(rate=6e-3), SIMULATED_DENSE)),
    ("results", "one seed each, {} at 4.5e-3", simulated([0], averages="once", rate=4.5e-3)),
    ("results", "at 4.5e-3 and {} at 9e-3", simulated([0], averages="once", rate=9e-3)),
    ("results", "| dense | {} | … | … | … |", beside_adamw(6e-3, **ALONE)),
    ("results", "| dense | … | {} | … | … |", beside_adamw(1.2e-2, **ALONE)),
    ("results", "| dense | … | … | {} | … |", beside_adamw(2.4e-2, **ALONE)),
    ("results", "| dense | … | … | … | {} |", beside_adamw(4.8e-2, **ALONE)),
    ("results", "| all in 2 bits | | {} |", beside_adamw(1.2e-2)),
    ("results", "| all in 2 bits | | … | {} |", beside_adamw(2.4e-2)),
    ("results", "AdamW on averaged gradients | | {} | … |", beside_adamw(1.2e-2, averages="once")),
    ("results", "AdamW on averaged gradients | | … | {} |", beside_adamw(2.4e-2, averages="once")),
    ("results", "as by default, {} at 3e-3", simulated([0], averages="once", restore_length=True, rate=3e-3)),
    ("results", "as much, and {} at 6e-3", simulated([0], averages="once", restore_length=True, rate=6e-3)),
    ("results", "16 ranks, 6e-3, one seed: {}, `low_bit`", quality("gpt-muon-ranks", "quantized@averaged-6e-3")),
    ("results", "one seed: …, `low_bit` {} (", quality("gpt-muon-ranks", "quantized@45-6e-3-0")),
    ("results", "on 32 ranks {}.", simulated([0], ranks=32, averages="once", rate=6e-3)),
    ("results", "each step, +{} % with AdamW", over(NANOGPT_RESTORED, NANOGPT_DENSE)),
    ("results", "AdamW on averaged gradients (+{} % without", over(NANOGPT_ONCE, NANOGPT_DENSE)),
    ("local_steps", "one seed, by default {} and", over(NANOGPT_RESTORED, NANOGPT_DENSE)),
    ("results", "| 1,024 | {} (2e-3; 1e-3", by_size(**ALONE, rate=2e-3)),
    ("results", "(2e-3; 1e-3: {}, 4e-3", by_size(**ALONE, rate=1e-3)),
    ("results", "4e-3: {}) | … (4e-3; 2e-3", by_size(**ALONE, rate=4e-3)),
    ("results", "4e-3: …) | {} (4e-3; 2e-3", by_size(rate=4e-3)),
    ("results", "(4e-3; 2e-3: {}, 8e-3", by_size(rate=2e-3)),
    ("results", "8e-3: {}) = **", by_size(rate=8e-3)),
    ("results", "8e-3: …) = **+{} %**", LITTLE_TEXT),
    ("results", "| {} (4e-3; 2e-3: …) |", by_size(**FEWER, rate=4e-3)),
    ("results", "(4e-3; 2e-3: {}) |", by_size(**FEWER, rate=2e-3)),
    ("results", "| 4,096 | {} (2e-3) |", by_size("gpt-1m-20", **ALONE, rate=2e-3)),
    ("results", "| 4,096 | … (2e-3) | {} (4e-3) = **", by_size("gpt-1m-20", rate=4e-3)),
    ("results", "| 4,096 | … (2e-3) | … (4e-3) = **+{} %**", MORE_TEXT),
    ("results", "= **+2.2 %** | {} (4e-3) |", by_size("gpt-1m-20", **FEWER, rate=4e-3)),
    ("results", "| 8,192 | {} (2e-3) |", by_size("gpt-2m-20", **ALONE, rate=2e-3)),
    ("results", "| 8,192 | … (2e-3) | {} (4e-3) = **", by_size("gpt-2m-20", rate=4e-3)),
    ("results", "| 8,192 | … (2e-3) | … (4e-3) = **+{} %**", MOST_TEXT),
    ("results", "= **+0.8 %** | {} (4e-3) |", by_size("gpt-2m-20", **FEWER, rate=4e-3)),
    ("choosing", "of 1 M and 4,096 bytes {} %,", MORE_TEXT),
    ("choosing", "2.5 M and 8,192 bytes {} % (", MOST_TEXT),
    ("choosing", "text a parameter lost {} % by", LITTLE_TEXT),
    ("choosing", "fewer bytes they lost {}, ", LITTLE_TEXT_FEWER),
    ("choosing", "fewer bytes they lost …, {} and", MORE_TEXT_FEWER),
    ("choosing", "fewer bytes they lost …, … and {} %", MOST_TEXT_FEWER),
    ("results", "and again by the averages, have {} on 4", simulated(ranks=4, averages="replay", own=1, rate=6e-3)),
    ("results", "on 4 ranks, `low_bit` {} at its best", simulated(ranks=4, rate=4.5e-3)),
    *(
        ("results", words, quality(experiment, *names))
        for words, experiment, *names in (
            *(
                (f"| dense |{before} {{}} |", "gpt-recipe", f"none@muon-adamw-{rate}-0")
                for before, rate in (("", "3e-3"), (" 1.951 |", "6e-3"), (" 1.951 | 1.890 |", "1.2e-2"))
            ),
            ("1.875 | **{}** (3 seeds) |", "gpt-recipe", "none@muon-adamw-2.4e-2"),
            ("**1.861** (3 seeds) | {} |", "gpt-recipe", "none@muon-adamw-4.8e-2-0"),
            ("47 times fewer bytes | | {} |", "gpt-recipe", "quantized@recipe-6e-3-0"),
            ("1.925 | **{}** (3 seeds) |", "gpt-recipe", "quantized@recipe-1.2e-2"),
            ("**1.878** (3 seeds) | {} (3 seeds)", "gpt-recipe", "quantized@recipe-2.4e-2"),
            ("seed 0, `low_bit` has {} and", "gpt-recipe", "quantized@recipe-1.2e-2-0"),
            ("#from-16-ranks-on) | | | {} |", "gpt-recipe", "quantized@averaged-1.2e-2-0"),
            ("#from-16-ranks-on) | | | … | {} (3 seeds)", "gpt-recipe", "quantized@averaged-2.4e-2"),
            ("| Muon, dense | 1 | {} (", "gpt-muon", "none@muon-3e-3"),
            ("(`low_bit`)** | 47 | {} (", "gpt-muon", "quantized@45-6e-3"),
            ("averages in 2** | 164 | {} (", "gpt-muon", "quantized@170-4.5e-3"),
            ("`decay=0.9` | 482 | {} (", "gpt-muon", "quantized@500-decay-3e-3"),
            ("as MuLoCo | 45 | {} |", "gpt-muon", "none@muloco-45-3e-3"),
            ("7.0 % | 3e-3 (1.5e-3: {}) |", "gpt-muon", "none@muloco-45-1.5e-3"),
            ('`orthogonal="matrices"`** (ring B) | 45 | {} |', "demo-ring", "demo-matrices-1of45-6e-3"),
            *(
                (f"6e-3 (ring A: {words})", "demo-subtract", f"d0.95-s0.2-lr{rate}-e15-0")
                for words, rate in (
                    ("{}; 2.058 at 4e-3 and 9e-3", "6e-3"),
                    ("2.042; {} at 4e-3 and 9e-3", "4e-3"),
                    ("2.042; {} at 4e-3 and 9e-3", "9e-3"),
                )
            ),
            ("`subtract=1, decay=0.9` (ring A) | 45 | {} (", "gpt-adamw", "demo@orthogonal-1of45-6e-3"),
            ("`subtract=1, decay=0.999` (ring A) | 45 | {} (", "gpt-adamw", "demo@slow-1of45-8e-3"),
            ("`subtract=1, decay=0.999` (ring A) | 150 | {} (", "gpt-adamw", "demo@orthogonal-1of150-8e-3"),
            ("as published | 45 | {} (", "gpt-adamw", "demo@gather-1of45-3e-3"),
            ("(ring A; ring B: 2.128) | 45 | {} (", "gpt-adamw", "demo-1of45-3e-3"),
            ("(ring A; ring B: {}) | 45 |", "demo-ring", "demo-1of45-3e-3"),
            ("(ring A; ring B: 2.228) | 150 | {} (", "gpt-adamw", "demo-1of150-3e-3"),
            ("(ring A; ring B: {}) | 150 |", "demo-ring", "demo-1of150-3e-3"),
            ("| AdamW, dense | 1 | {} (", "gpt-adamw", "none-6e-3"),
            ("gradients, 8 bits | 4 | {} |", "gpt-adamw", "quantized@8bits-6e-3"),
            ("gradients, 4 bits | 8 | {} |", "gpt-adamw", "quantized@4bits-3e-3"),
            ("AdamW, 3 local steps, Quantized, 2 bits | 47 | {} |", "gpt-muon", "quantized@adamw-45-3e-3"),
            ("18 % | 3e-3 (1.5e-3: {}) |", "gpt-muon", "quantized@adamw-45-1.5e-3"),
            ("| FFT | {} | 2.684", "gpt-adamw", "fft-1of8-3e-3"),
            ("| FFT | 2.330 | {} |", "gpt-adamw", "fft-1of16-1.5e-3"),
            ("| FFT | 2.330 | 2.684 | {} |", "gpt-adamw", "fft-1of64-3e-3"),
            ("| IWP | {} | 2.446", "gpt-adamw", "iwp-1of8-1.5e-3"),
            ("| IWP | 2.479 | {} |", "gpt-adamw", "iwp-1of16-3e-3"),
            ("| IWP | 2.479 | 2.446 | {} |", "gpt-adamw", "iwp-1of64-3e-3"),
            ("| TopK | {} | 3.111", "gpt-adamw", "topk-1of8-1.5e-3"),
            ("| TopK | 3.047 | {} |", "gpt-adamw", "topk-1of16-3e-3"),
            ("| TopK | 3.047 | 3.111 | {} |", "gpt-adamw", "topk-1of64-3e-3"),
            ("as DiLoCo | 50 | {} |", "gpt-adamw", "none@diloco-50-3e-3"),
            ("36 % | 3e-3 (1.5e-3: {}) |", "gpt-adamw", "none@diloco-50-1.5e-3"),
            ("PowerSGD, rank 2 | 66 | {} |", "gpt-adamw", "powersgd@2-3e-3"),
            ("34 % | 3e-3 (1.5e-3: {})", "gpt-adamw", "powersgd@2-1.5e-3"),
            ("2 bits at 4.5e-3, one seed: {} at once", "gpt-muon", "quantized@45-4.5e-3-0"),
            ("at once, {} with a delay of two steps", "gpt-muon", "quantized@delay-2-4.5e-3"),
            ("two steps, {} with three", "gpt-muon", "quantized@fragments-delay-4.5e-3"),
            ("(ring A) {} with three fragments", "gpt-muon", "quantized@fragments-4.5e-3"),
            ("three fragments, {} with a delay of one.", "gpt-muon", "quantized@delay-4.5e-3"),
            ("averages in 2: {} at once", "gpt-muon", "quantized@170-4.5e-3"),
            ("at once, {} with four fragments and a delay of two", "gpt-muon", "quantized@late-170-3e-3"),
            ("one seed: {}; with four fragments", "gpt-muon", "quantized@500-decay-3e-3-0"),
            ("a delay of four {}", "gpt-muon", "quantized@late-500-3e-3"),
            ("2 bits: {} on 16 ranks", "gpt-muon-ranks", "quantized@45-6e-3"),
            ("over 1.885), {} on 32", "gpt-muon-ranks/32", "quantized@45-6e-3"),
            ("fewer bytes {} on 16", "gpt-muon-ranks", "quantized@170-6e-3"),
            ("(ring A): {}, 2.154", "gpt-adamw", "demo-1of45-3e-3-0"),
            ("(ring A): 2.142, {} and", "gpt-ranks/8", "demo-1of45-3e-3"),
            ("2.154 and {} on 4, 8 and 16", "gpt-ranks/16", "demo-1of45-3e-3"),
            ("as published {}, 2.232", "gpt-adamw", "demo@gather-1of45-3e-3-0"),
            ("as published 2.120, {} and", "gpt-ranks/8", "demo@gather-1of45-3e-3"),
            ("2.232 and {}, because", "gpt-ranks/16", "demo@gather-1of45-3e-3"),
            ("orthogonal {} (2.100)", "gpt-nodes", "demo@nodes-orthogonal-6e-3"),
            ("orthogonal 2.104 ({})", "gpt-adamw", "demo@orthogonal-1of45-6e-3"),
            ("ring {} (2.139)", "gpt-nodes", "demo@nodes-3e-3"),
            ("ring 2.151 ({})", "gpt-adamw", "demo-1of45-3e-3"),
            ("gather {} (2.117)", "gpt-nodes", "demo@nodes-gather-3e-3"),
            ("gather 2.128 ({})", "gpt-adamw", "demo@gather-1of45-3e-3"),
            ("0.07 M | 1,500 | {} |", "gpt-sizes/gpt-70k", "none@muon-4.5e-3"),
            ("0.07 M | 1,500 | 2.453 | {} (ring A) |", "gpt-sizes/gpt-70k", "quantized@45-4.5e-3"),
            ("0.25 M | 1,500 | {} |", "gpt-muon", "none@muon-3e-3-0"),
            ("0.25 M | 1,500 | 1.882 | {} |", "gpt-muon", "quantized@45-4.5e-3-0"),
            ("0.97 M | 1,500 | {} |", "gpt-sizes/gpt-1m", "none@muon-3e-3"),
            ("0.97 M | 1,500 | 1.575 | {} (ring A) |", "gpt-sizes/gpt-1m", "quantized@45-4.5e-3"),
            ("10,000 | {} |", "gpt-long", "none@muon-3e-3"),
            ("10,000 | 1.691 | {} (ring A) |", "gpt-long", "quantized@45-4.5e-3"),
            ("dense AdamW {}; three local", "gpt-tune", "none-3e-3"),
            ("fewer bytes, {}; Quantized, 4 bits", "gpt-tune", "quantized@local-3e-3"),
            ("Quantized, 4 bits, {}; DeMo", "gpt-tune", "quantized@4bits-1e-3"),
            ("43 times fewer, {} (", "gpt-tune", "demo@orthogonal-1e-3"),
            ("dense Muon {}, 3 local", "vit-muon", "none@muon-1e-3"),
            ("in 2 bits {} (two seeds each)", "vit-muon", "quantized@45-2e-3"),
            ("in which dense Muon has {}:", "vit-muon", "none@muon-1e-3-0"),
            ("| plain | {} (ring A) | 0.7139", "vit-muon", "quantized@45-1e-3-0"),
            ("| plain | 0.7095 (ring A) | {} |", "vit-muon", "quantized@45-2e-3-0"),
            ("| plain | 0.7095 (ring A) | 0.7139 | {} (ring A) |", "vit-muon", "quantized@45-3e-3-0"),
            ("| {} | **0.7173**", "vit-muon", "quantized@averaged-1e-3-0"),
            ("0.7108 | **{}** |", "vit-muon", "quantized@averaged-2e-3-0"),
            ("| **0.7173** | {} |", "vit-muon", "quantized@averaged-3e-3-0"),
            ("| the same, length restored | {} |", "vit-muon", "quantized@averaged-restored-1e-3-0"),
            ("| plain, length restored | | {} |", "vit-muon", "quantized@restored-2e-3-0"),
            ("10 epochs {} and 0.7850", "vit-muon/10", "none@muon-1e-3"),
            ("0.7914 and {}.", "vit-muon/10", "quantized@45-2e-3"),
            ("Dense AdamW {}, DeMo with signs (ring A)", "vit", "none-5e-4"),
            ("32 times fewer bytes, {}, at", "vit", "demo-1of32-1e-3"),
            ("Dense reaches {}*", "cifar10-budgets", "none"),
            ("0.7808*, fp16 {}.", "cifar10-budgets", "fp16"),
            ("10 epochs**: dense {} (", "cifar10-signs/10", "none-0.3", "cifar10/none"),
            ("DeMo (ring A) {} with `orthogonal=True`", "cifar10-signs/10", "demo@orthogonal-1of64-6e-3"),
            ("`orthogonal=True`, {} without", "cifar10-signs/10", "demo-1of64-7e-3"),
            ("block means {}, 0.8312", "cifar10", "iwp-16"),
            ("0.8323, {} and", "cifar10", "iwp-32"),
            ("0.8312 and {} with", "cifar10", "iwp-64"),
            ("one rate, ring A: dense {};", "cifar10-muon", "none@muon-6e-3"),
            ("59 times fewer bytes, {} (", "cifar10-muon", "quantized@64-6e-3"),
            ("4 epochs: dense {} and", "cifar10-short", "none-0.1"),
            ("0.7660 and {};", "cifar10-short", "none-0.3"),
            ("`take_momentum` {} and 0.7463", "cifar10-short", "iwp-64-plain-0.1"),
            ("0.7227 and {}, with", "cifar10-short", "iwp-64-plain-0.3"),
            ("with it {} at 0.3", "cifar10-short", "iwp-64-0.3"),
            ("3 seeds: dense {}, fp16", "digits", "none"),
            ("0.9880, fp16 {};", "digits", "fp16"),
            ("FFT {}, MIPD", "digits", "fft-32-lanes4"),
            ("MIPD {}, IWP", "digits", "mipd-16-lanes4"),
            ("MIPD 0.9843, IWP {} (", "digits", "iwp-32-lanes4"),
        )
    ),
    *nanogpts(),
    ("results", "`low_bit` loses {} % there", NANOGPT),
    ("results", "twice the rate, {} % over it", NANOGPT_TWICE),
]  # fmt: skip


def page(name: str) -> str:
    """A page's words, with one space between them."""
    file = ROOT / "README.md" if name == "README" else ROOT / "docs" / f"{name}.md"
    return " ".join(file.read_text().split())


def checked() -> Iterator[tuple[str, str, str, Source]]:
    """The page, words, printed figure ("" if the page does not have the words) and source of each."""
    for name, words, source in STATED:
        pattern = re.escape(words).replace("…", r"[\d.,]+").replace(r"\{\}", r"(\d[\d.,]*)")
        found = re.search(pattern, page(name))
        yield name, words, found[1].rstrip(",.") if found else "", source


def holds(printed: str, source: Source) -> bool:
    """Tells whether the printed figure is what was measured, rounded."""
    return bool(printed) and f"{source.value:,.{len(printed.partition('.')[2])}f}" == printed


def listed() -> str:
    """The page of stated figures."""
    found = [
        {
            "page": name,
            "figure": words.replace("|", "\\|").replace("{}", f"**{printed}**"),
            "measured": f"{source.value:.5g}",
            "ring": source.ring,
            "code of": source.date,
            "runs": source.runs.replace("|", "\\|"),
        }
        for name, words, printed, source in checked()
    ]
    return f"{HEAD}{table.markdown(found, left=6)}\n"


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--write", action="store_true")
    if parser.parse_args().write:
        PAGE.write_text(listed())
    wrong = 0
    for name, words, printed, source in checked():
        wrong += not (good := holds(printed, source))
        print(
            f"{name}: {words.format(printed or '?')}  <-  {source.value:.5g} ({source.runs}){'' if good else '  WRONG'}"
        )
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
