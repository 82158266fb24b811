#!/usr/bin/env python3
"""List the figures that README and the pages state, each with the stored runs it is from and what these give.

    stated.py       a line each; the exit status is 1 if one is not what was measured (tests/docs/test_stated.py)

Other figures of simulations are compared with docs/results/ranks-apart, tables that scripts write with these
scripts, by other tests. "Printed only" on a page says that there is no file.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import figures
import ranks_apart
from experiment.files import script_parser
from simulation.setting import Setting

ROOT = Path(__file__).resolve().parents[2]


class Source(NamedTuple):
    """Stored runs, and what they give."""

    runs: str
    value: float


def quality(experiment: str, *names: str) -> Source:
    """Returns the mean over runs and their seeds: NAME, or NAME-0, NAME-1, NAME-2; OTHER/NAME of another experiment."""
    found = []
    for name in names:
        folder, _, name = name.rpartition("/")
        runs = figures.read(figures.RESULTS, folder or experiment)
        seeds = [run for key, run in runs.items() if key in (name, *(f"{name}-{seed}" for seed in range(3)))]
        found += [run.get("test_bits_per_byte", run.get("test_accuracy")) for run in seeds]
    return Source(f"{experiment}: {', '.join(names)}, {len(found)} runs", sum(found) / len(found))


def over(one: Source, other: Source) -> Source:
    """Returns by how many per cent the first is larger."""
    return Source(f"{one.runs}, over {other.runs}", 100 * (one.value / other.value - 1))


def below(one: Source, other: Source) -> Source:
    """Returns by how many per cent the first is smaller."""
    return Source(f"{one.runs}, below {other.runs}", 100 * (1 - one.value / other.value))


def fewer(experiment: str, name: str) -> Source:
    """Returns how many times fewer bytes a run sent."""
    run = figures.read(figures.RESULTS, experiment)[name]
    return Source(f"{experiment}: {name}", run["wire_ratio"])


def step(experiment: str, rate: str, method: str) -> Source:
    """Returns milliseconds."""
    runs = figures.read(figures.RESULTS, experiment).values()
    (found,) = [row["step_ms"] for run in runs for row in run["rows"] if (row["rate"], row["method"]) == (rate, method)]
    return Source(f"{experiment}: {method} at {rate}", found)


def times(one: Source, other: Source) -> Source:
    """Returns how many times the second fits into the first."""
    return Source(f"{one.runs} / {other.runs}", one.value / other.value)


def race(place: str, method: str) -> Source:
    """Returns seconds."""
    return Source(f"race of {place}: {method}", figures.races(figures.RESULTS).loc[place.replace(", ", "\n"), method])


def simulated(**setting: Any) -> Source:
    """Returns the loss of a simulation of ranks_apart.py."""
    return Source(f"ranks-apart: {setting}", ranks_apart.read(ranks_apart.FILE)[Setting(**setting)])


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
FP16 = {rate: step("exchange-pause", rate, "fp16") for rate in ("10gbit", "1gbit", "100mbit")}
FEW = {rate: step("exchange-pause", rate, "ddp-quantized@few") for rate in FP16}
LATE = {rate: step("exchange-pause", rate, "ddp-quantized@late") for rate in FP16}

ONCE = [simulated(ranks=16, rate=6e-3, task=task, averages="once") for task in ("gpt", "gpt-adamw")]

#: Page, words in which {} stands for the figure, source.
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
    ("choosing", "bits per byte {} % above dense Muon", over(RECIPE, RECIPE_DENSE)),
    ("choosing", "above dense Muon, {} % below dense AdamW", below(RECIPE, ADAMW)),
    ("choosing", "accuracy {}, dense 0.885", TUNED),
    ("choosing", "accuracy 0.886, dense {} |", TUNED_DENSE),
    ("choosing", "DeMo {} % below dense AdamW", below(DEMO, ADAMW)),
    ("choosing", "GPT: {} % above dense AdamW; 0.6 %", over(ADAMW_LOCAL, ADAMW)),
    ("choosing", "above dense AdamW; {} % (one seed)", over(ADAMW_8, ADAMW)),
    ("choosing", "10 epochs: {}, dense 0.8410 |", CIFAR_DEMO),
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
    ("choosing", "ended at {} after 194 steps", quality("race-vgg11", "1gbit-iwp-mpi")),
    ("choosing", "194 steps, dense at {}", quality("race-vgg11", "100mbit-none-mpi")),
    *(
        ("benchmarks", f"{link} | {{}} |", FP16[rate])
        for link, rate in (("10 Gbit/s, 100 ms", "10gbit"), ("1 Gbit/s, 100 ms", "1gbit"), ("350 ms", "100mbit"))
    ),
    *(
        ("benchmarks", f"| {FP16[rate].value:,.0f} | {{}} (", FEW[rate]) for rate in FP16
    ),
    *(
        ("benchmarks", f"| {FP16[rate].value:,.0f} | {FEW[rate].value:,.0f} ([\\d,]+) | {{}} (", LATE[rate])
        for rate in FP16
    ),
    ("benchmarks", "at 100 Mbit/s: FFT {} s,", race("vgg11 to 0.6, 100 Mbit/s", "FFT")),
    ("benchmarks", "270 s, IWP {},", race("vgg11 to 0.6, 100 Mbit/s", "IWP")),
    ("benchmarks", "IWP 344, fp16 {},", race("vgg11 to 0.6, 100 Mbit/s", "fp16")),
    ("benchmarks", "fp16 454, dense {};", race("vgg11 to 0.6, 100 Mbit/s", "dense")),
    ("benchmarks", "100 Mbit/s: fp16 {}, IWP 306", race("resnet20 to 0.7, 100 Mbit/s", "fp16")),
    ("benchmarks", "fp16 288, IWP {}, dense", race("resnet20 to 0.7, 100 Mbit/s", "IWP")),
    ("results", "one seed at 6e-3: {} on 16 ranks", ONCE[0]),
    ("results", "AdamW in place of signs {}.", ONCE[1]),
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
            ("**1.878** (3 seeds) | {} |", "gpt-recipe", "quantized@recipe-2.4e-2-0"),
            ("at 1.2e-2 it is {} and", "gpt-recipe", "quantized@recipe-1.2e-2-0"),
            ("for many ranks, it is {} on", "gpt-recipe", "quantized@averaged-1.2e-2-0"),
            ("| Muon, dense | 1 | {} (", "gpt-muon", "none@muon-3e-3"),
            ("(`low_bit`)** | 47 | {} (", "gpt-muon", "quantized@45-6e-3"),
            ("averages in 2** | 164 | {} (", "gpt-muon", "quantized@170-4.5e-3"),
            ("`decay=0.9` | 482 | {} (", "gpt-muon", "quantized@500-decay-3e-3"),
            ("as MuLoCo | 45 | {} |", "gpt-muon", "none@muloco-45-3e-3"),
            ('`orthogonal="matrices"`** (ring B) | 45 | {} |', "demo-ring", "demo-matrices-1of45-6e-3"),
            ("`subtract=1, decay=0.9` (ring A) | 45 | {} (", "gpt-adamw", "demo@orthogonal-1of45-6e-3"),
            ("`subtract=1, decay=0.999` (ring A) | 45 | {} (", "gpt-adamw", "demo@slow-1of45-8e-3"),
            ("`subtract=1, decay=0.999` (ring A) | 150 | {} (", "gpt-adamw", "demo@orthogonal-1of150-8e-3"),
            ("as published | 45 | {} (", "gpt-adamw", "demo@gather-1of45-3e-3"),
            ("(ring A; B: 2.128) | 45 | {} (", "gpt-adamw", "demo-1of45-3e-3"),
            ("(ring A; B: {}) | 45 |", "demo-ring", "demo-1of45-3e-3"),
            ("(ring A; B: 2.228) | 150 | {} (", "gpt-adamw", "demo-1of150-3e-3"),
            ("(ring A; B: {}) | 150 |", "demo-ring", "demo-1of150-3e-3"),
            ("| AdamW, dense | 1 | {} (", "gpt-adamw", "none-6e-3"),
            ("gradients, 8 bits | 4 | {} |", "gpt-adamw", "quantized@8bits-6e-3"),
            ("gradients, 4 bits | 8 | {} |", "gpt-adamw", "quantized@4bits-3e-3"),
            ("2 bits (ring A) | 47 | {} |", "gpt-muon", "quantized@adamw-45-3e-3"),
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
            ("PowerSGD, rank 2 | 66 | {} |", "gpt-adamw", "powersgd@2-3e-3"),
            ("2 bits at 4.5e-3, one seed: {} at once", "gpt-muon", "quantized@45-4.5e-3-0"),
            ("(ring A) {} with three fragments", "gpt-muon", "quantized@fragments-4.5e-3"),
            ("three fragments, {} with a delay", "gpt-muon", "quantized@delay-4.5e-3"),
            ("one step, {} with both", "gpt-muon", "quantized@fragments-delay-4.5e-3"),
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
            ("0.07 M | 1,500 | 2.453 | {} |", "gpt-sizes/gpt-70k", "quantized@45-4.5e-3"),
            ("0.25 M | 1,500 | {} |", "gpt-muon", "none@muon-3e-3-0"),
            ("0.25 M | 1,500 | 1.882 | {} |", "gpt-muon", "quantized@45-4.5e-3-0"),
            ("0.97 M | 1,500 | {} |", "gpt-sizes/gpt-1m", "none@muon-3e-3"),
            ("0.97 M | 1,500 | 1.575 | {} |", "gpt-sizes/gpt-1m", "quantized@45-4.5e-3"),
            ("10,000 | {} |", "gpt-long", "none@muon-3e-3"),
            ("10,000 | 1.691 | {} |", "gpt-long", "quantized@45-4.5e-3"),
            ("dense AdamW {}; three local", "gpt-tune", "none-3e-3"),
            ("fewer bytes, {}; Quantized, 4 bits", "gpt-tune", "quantized@local-3e-3"),
            ("Quantized, 4 bits, {}; DeMo", "gpt-tune", "quantized@4bits-1e-3"),
            ("43 times fewer, {} (", "gpt-tune", "demo@orthogonal-1e-3"),
            ("dense Muon {}, 3 local", "vit-muon", "none@muon-1e-3"),
            ("in 2 bits {} (two seeds each)", "vit-muon", "quantized@45-2e-3"),
            ("10 epochs {} and 0.7850", "vit-muon/10", "none@muon-1e-3"),
            ("0.7914 and {}.", "vit-muon/10", "quantized@45-2e-3"),
            ("Dense AdamW {}, DeMo", "vit", "none-5e-4"),
            ("32 times fewer bytes, {}, at", "vit", "demo-1of32-1e-3"),
            ("Dense reaches {}*", "cifar10-budgets", "none"),
            ("0.7808*, fp16 {}.", "cifar10-budgets", "fp16"),
            ("10 epochs**: dense {} (", "cifar10-signs/10", "none-0.3", "cifar10/none"),
            ("DeMo {} with `orthogonal=True`", "cifar10-signs/10", "demo@orthogonal-1of64-6e-3"),
            ("`orthogonal=True`, {} without", "cifar10-signs/10", "demo-1of64-7e-3"),
            ("block means {}, 0.8312", "cifar10", "iwp-16"),
            ("0.8323, {} and", "cifar10", "iwp-32"),
            ("0.8312 and {} with", "cifar10", "iwp-64"),
            ("one rate: dense {};", "cifar10-muon", "none@muon-6e-3"),
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
]  # fmt: skip


def page(name: str) -> str:
    """A page's words, with one space between them."""
    file = ROOT / "README.md" if name == "README" else ROOT / "docs" / f"{name}.md"
    return " ".join(file.read_text().split())


def checked() -> Iterator[tuple[str, str, str, Source]]:
    """The page, words, printed figure ("" if the page does not have the words) and source of each."""
    for name, words, source in STATED:
        pattern = re.escape(words).replace(r"\{\}", r"(\d[\d.,]*)").replace(re.escape(r"([\d,]+)"), r"\([\d,]+\)")
        found = re.search(pattern, page(name))
        yield name, words, found[1].rstrip(",.") if found else "", source


def holds(printed: str, source: Source) -> bool:
    """Tells whether the printed figure is what was measured, rounded."""
    return bool(printed) and f"{source.value:,.{len(printed.partition('.')[2])}f}" == printed


def main() -> None:
    script_parser(__doc__).parse_args()
    wrong = 0
    for name, words, printed, source in checked():
        wrong += not (good := holds(printed, source))
        print(
            f"{name}: {words.format(printed or '?')}  <-  {source.value:.5g} ({source.runs}){'' if good else '  WRONG'}"
        )
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
