#!/usr/bin/env python3
"""All figures of the documentation, and two tables of docs/benchmarks.md, from the results in docs/results.

One style for all; at most six curves, or six bars a group. Where results are missing, that is an error.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import pandas as pd
import race
import table
from experiment.files import script_parser
from experiment.result_file import Result, read_runs

ROOT = Path(__file__).resolve().parents[2]
RESULTS, FIGURES = ROOT / "docs" / "results", ROOT / "docs" / "figures"

LINKS = {"none": "no limit", "10gbit": "10 Gbit/s", "1gbit": "1 Gbit/s", "100mbit": "100 Mbit/s"}
#: The figure of accuracy: label, and EXPERIMENT/RUN, of which further seeds have a number more in their names.
ACCURACY = {
    "dense": "cifar10-budgets/none",
    "fp16": "cifar10-budgets/fp16",
    "IWP, 1/64 of the bytes": "cifar10-budgets/64-iwp-lanes4",
    "FFT, 1/64": "cifar10-budgets/64-fft",
    "DeMo, 1/64": "cifar10-signs/4/demo-1of64-1e-2-0",
    "TopK, 1/64": "cifar10-budgets/64-topk",
}
SCALING = ("dense", "IWP", "SlimDP", "TopK", "QSGD", "TernGrad")
#: The figure of steps: label, and method in exchange-ring.
STEPS = {"dense, ring": "none", "fp16, ring": "fp16", "IWP": "iwp", "DeMo": "demo"}
#: Accuracies.
RACES = {
    "race-vgg11": ("vgg11 to 0.6", 0.6),
    "race-resnet20": ("resnet20 to 0.7", 0.7),
}
RACERS = {"none": "dense", "fp16": "fp16", "iwp": "IWP", "fft": "FFT"}
#: The figure of text: label, experiment, and how the names of its runs begin.
TEXT = {
    "Muon: dense, local steps": ("gpt-muon", "none@muon-", "quantized@45-", "quantized@170-", "quantized@500-"),
    "AdamW, dense": ("gpt-adamw", "none-"),
    "DeMo, orthogonal": ("gpt-adamw", "demo@orthogonal-"),
    "DeMo": ("gpt-adamw", "demo-"),
    "AdamW + IWP": ("gpt-adamw", "iwp-"),
    "AdamW + FFT": ("gpt-adamw", "fft-"),
}

BASELINES = {"dense": "dense, ring", "fp16": "fp16, ring"}
#: The table of computing: label, and method in exchange-share; the links, and those that they are slowed down to.
SHARES = {
    "float32, in each step": "ddp-none",
    "fp16, in each step": "ddp-fp16",
    **{f"DiLoCo, period {period}": f"ddp-none@diloco-{period}" for period in (1, 8, 32, 128)},
    "period 3, 2 bits": "ddp-quantized@47",
    "period 5, 1 bit": "ddp-quantized@151",
    "period 8, 1 bit, averages in 2": "ddp-quantized@171",
    "period 16, 1 bit": "ddp-quantized@483",
    "the same, 4 fragments, delay 4": "ddp-quantized@483-late",
}
#: Rate and delay one way in ms of the lab, ten times slowed down; of the second table by round trip.
RATES = {"1 Gbit/s": "100mbit", "200 Mbit/s": "20mbit"}
SLOWED = {link: (rate, 0) for link, rate in {"5 Gbit/s": "500mbit", **RATES, "50 Mbit/s": "5mbit"}.items()}
SLOWED_FAR = {f"{link}, {trip} ms": (rate, 5 * trip) for link, rate in RATES.items() for trip in (10, 50)}
#: What a table of docs/benchmarks.md stands between.
MARK, END = "<!-- {}: written by scripts/experiments/figures.py -->", "<!-- end -->"
#: Words in labels, of which the first that fits counts, and positions in the lists of colours and the like in table.py.
LOOKS = ("Muon", "orthogonal", "dense", "fp16", "IWP", "FFT", "SlimDP", "TernGrad", "DeMo", "TopK", "QSGD", "DGC")
PLACES = (5, 6, 0, 1, 2, 3, 3, 4, 4, 5, 6, 6)


def read(results: Path, experiment: str) -> dict[str, Result]:
    """The runs of an experiment by name."""
    return read_runs(results / experiment / "runs.jsonl")


def seeds(results: Path, row: str) -> list[Result]:
    """A row of the figure of accuracy: a run and its further seeds."""
    experiment, _, name = row.rpartition("/")
    runs = read(results, experiment)
    return [runs[seed] for seed in (name, f"{name}-1", f"{name}-2") if seed in runs]


def steps(results: Path) -> pd.DataFrame:
    """Milliseconds of a step of ResNet-50's shapes on four hosts: a row for each rate, a column for each method."""
    runs = read(results, "exchange-ring").values()
    found = {(row["rate"], row["method"]): row["step_ms"] for run in runs for row in run["rows"]}
    return pd.DataFrame(
        {label: {name: found[rate, method] for rate, name in LINKS.items()} for label, method in STEPS.items()}
    )


def shares(results: Path, links: Mapping[str, tuple[str, float]]) -> list[dict[str, Any]]:
    """For each exchange and one of the ``links``, the share of a step that is computing, and ms a step.

    The computing is a pause. Beside it and the exchange stands the optimizer's update, which on a card would be a small
    part of the pause: what a step without an exchange takes beyond the pause, the median of all runs of these links, is
    taken out.
    """
    of_runs = [(run["config"], row) for run in read(results, "exchange-share").values() for row in run["rows"]]
    rows = [(about, row) for about, row in of_runs if _shaped(about, row) in links.values()]
    update = median(row["alone_ms"] - about["pause_ms"] for about, row in rows)
    steps, fewer = dict[tuple[str, tuple[str, float]], str](), dict[str, float]()
    for about, row in rows:
        method, share = row["method"], about["pause_ms"] / (row["step_ms"] - update)
        steps[method, _shaped(about, row)] = f"{share:.0%} ({row['step_ms']:,.0f})"
        fewer[method] = min(row["wire_ratio"], fewer.get(method, row["wire_ratio"]))
    return [
        {"exchange": label, "fewer bytes": f"{fewer[method]:.0f}"}
        | {link: steps.get((method, shaped), "-") for link, shaped in links.items()}
        for label, method in SHARES.items()
        if method in fewer
    ]


def _shaped(about: Mapping[str, Any], row: Mapping[str, Any]) -> tuple[str, float]:
    """The rate and the delay of the links of a row."""
    return row["rate"], about.get("delay_ms", 0)


def races(results: Path) -> pd.DataFrame:
    """Seconds to a target: a row for each race and rate, a column for each method."""
    rows: dict[str, dict[str, float]] = {}
    for folder, (name, target) in RACES.items():
        for rate, found in race.read(results / folder).items():
            times = {label: race.reached(found[method], target) for method, label in RACERS.items() if method in found}
            rows[f"{name}\n{LINKS[rate]}"] = {label: there[1] for label, there in times.items() if there}
    return pd.DataFrame.from_dict(rows, orient="index").reindex(columns=list(RACERS.values()))


def break_even(results: Path) -> list[float]:
    """Gbit/s below which the saved bytes are worth IWP's time, at each rate of the figure of steps."""
    runs = read(results, "exchange-ring").values()
    return [row["break_even_gbit_s"] for run in runs for row in run["rows"] if row["method"] == STEPS["IWP"]]


def text(results: Path) -> dict[str, list[tuple[float, float]]]:
    """For each method (times fewer bytes, bits per byte): the mean of its seeds at the learning rate that was best with
    the first of them."""
    found = {}
    for label, (experiment, *beginnings) in TEXT.items():
        of_method = [run for name, run in read(results, experiment).items() if name.startswith(tuple(beginnings))]
        if not of_method:
            raise ValueError(f"{experiment} has no runs of {label}")
        runs: dict[int, dict[float, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
        for run in of_method:
            runs[round(run["wire_ratio"])][run["config"]["lr"]][run["config"]["seed"]] = run["test_bits_per_byte"]
        found[label] = []
        for ratio, by_rate in sorted(runs.items()):
            best = min(by_rate.values(), key=lambda by_seed: by_seed[min(by_seed)])
            found[label].append((float(ratio), sum(best.values()) / len(best)))
    return found


def place(label: str) -> int:
    """Of a method's look in the tables of looks."""
    return next(place for word, place in zip(LOOKS, PLACES, strict=True) if word in label)


def line(label: str) -> dict[str, Any]:
    """The look of a line."""
    number = place(label)
    look = {"color": table.COLOURS, "marker": table.MARKERS, "linestyle": table.DASHES}
    return {"label": label, **{name: choices[number] for name, choices in look.items()}}


def draw_accuracy(results: Path, file: Path) -> None:
    about = {"xscale": "log", "xlabel": "bytes sent per rank", "ylabel": "test accuracy, CIFAR-10"}
    with table.chart(file, **about) as axes:
        for label, name in ACCURACY.items():
            entries = pd.concat([pd.DataFrame(run["history"]) for run in seeds(results, name)])
            mean = entries.groupby(level=0)[["wire_bytes", "test_accuracy"]].mean()
            axes.plot(mean["wire_bytes"], mean["test_accuracy"], **line(label))


def draw_steps(results: Path, file: Path) -> None:
    bars(steps(results), file, "ms a step, 25.6 M parameters", ylim=(100, 30_000), yscale="log")


def draw_races(results: Path, file: Path) -> None:
    bars(races(results), file, "seconds to the target")


def draw_scaling(results: Path, file: Path) -> None:
    scaling = read(results, "scaling")["scaling"]
    about = {"xlabel": f"ranks (up to {scaling['counted'][-1]}: counted)", "ylabel": "bytes a rank sends in a step"}
    with table.chart(file, **about) as axes:
        for method in SCALING:
            sent = {int(ranks): count for ranks, count in scaling["methods"][method]["bytes"].items()}
            axes.loglog(sent.keys(), sent.values(), **line(method))
        axes.set_xticks(list(sent), labels=map(str, sent))
        axes.minorticks_off()


def draw_text(results: Path, file: Path) -> None:
    about = {"xlabel": "times fewer bytes than dense", "ylabel": "bits per byte, GPT (lower is better)"}
    with table.chart(file, **about) as axes:
        axes.set_xscale("log")
        for label, points in text(results).items():
            axes.plot(*zip(*points, strict=True), **line(label))
        ratios = sorted({ratio for points in text(results).values() for ratio, _ in points})
        apart = [ratio for before, ratio in zip([0.0, *ratios], ratios, strict=False) if ratio > 1.1 * before]
        axes.set_xticks(apart, labels=[f"{ratio:g}" for ratio in apart])
        axes.minorticks_off()


def bars(frame: pd.DataFrame, file: Path, ylabel: str, **settings: Any) -> None:
    """A group of bars for each row, told apart by colour and hatch, with their values."""
    with table.chart(file, ylabel=ylabel, **settings) as axes:
        places = [place(label) for label in frame]
        colours = [table.COLOURS[number] for number in places]
        frame.plot.bar(ax=axes, width=0.85, rot=0, color=colours, edgecolor="white")
        for container, number in zip(axes.containers, places, strict=True):
            texts = [f"{value:,.0f}" if value > 0 else "" for value in container.datavalues]
            axes.bar_label(container, texts, fontsize=10, padding=2)
            for bar in container:
                bar.set_hatch(table.HATCHES[number])


FIGURE: dict[str, Callable[[Path, Path], None]] = {
    "accuracy": draw_accuracy,
    "time-to-quality": draw_races,
    "scaling": draw_scaling,
    "steps": draw_steps,
    "text": draw_text,
}


def benchmarks(page: str, results: Path) -> str:
    """docs/benchmarks.md with its tables as the results are now."""
    times = [
        {"links": links, **{label: f"{ms:,.0f}" for label, ms in row.items()}}
        | {f"IWP over {label}": f"{row[column] / row['IWP']:.2g}" for label, column in BASELINES.items()}
        for links, row in steps(results).iterrows()
    ]
    for name, rows in {
        "shares": shares(results, SLOWED),
        "shares-far": shares(results, SLOWED_FAR),
        "steps": times,
    }.items():
        mark = MARK.format(name)
        before, rest = page.split(mark)
        page = f"{before}{mark}\n{table.markdown(rows)}\n{END}{rest.split(END, 1)[1]}"
    return page


def main() -> None:
    script_parser(__doc__).parse_args()
    page = ROOT / "docs" / "benchmarks.md"
    page.write_text(benchmarks(page.read_text(), RESULTS))
    for name, draw in FIGURE.items():
        draw(RESULTS, FIGURES / f"{name}.png")


if __name__ == "__main__":
    main()
