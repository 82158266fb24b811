#!/usr/bin/env python3
"""Markdown table, CSV and plots of what `train.py --json` wrote.

    table.py results/*.json --plot results/accuracy.png

Runs that differ in nothing but the seed share a row: mean ± half the range.
"""

from __future__ import annotations

import argparse
import csv
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from experiment.older import complete

Result = dict[str, Any]

# What may differ between the runs of a row: the seed, and what cannot change the outcome.
NOT_A_SETTING = {
    "seed", "json", "trace", "data_dir", "progress", "eval_every",
    "python", "torch", "horovod", "hvd_compress", "git_commit", "cpus", "cpu_capability", "settings",
    "threads_per_rank",
}  # fmt: skip


def settings(result: Result) -> dict[str, Any]:
    """What makes two runs comparable: the whole configuration but NOT_A_SETTING, and the number of ranks."""
    config = {key: value for key, value in complete(result["config"]).items() if key not in NOT_A_SETTING}
    return {**config, "ranks": result["ranks"]}


def grouped(results: Sequence[Result]) -> list[tuple[str, list[Result]]]:
    """Rows: (label, runs), in order of first appearance. The label says where a row differs from the others."""
    groups: dict[str, list[Result]] = {}
    for result in results:
        groups.setdefault(json.dumps(settings(result), sort_keys=True), []).append(result)
    rows = [settings(runs[0]) for runs in groups.values()]
    keys = {key: None for row in rows for key in row if key not in ("compression", "density")}
    differing = [key for key in keys if _differs(key, rows)]
    labels = [_label(row, differing) for row in rows]
    return list(zip(labels, groups.values(), strict=True))


def _differs(key: str, rows: list[dict[str, Any]]) -> bool:
    """Whether a row must say what its ``key`` is. Methods may differ in the default of an option that not all have."""
    groups = [rows]
    if not all(key in row for row in rows):
        methods = {row["compression"] for row in rows}
        groups = [[row for row in rows if row["compression"] == method and key in row] for method in methods]
    return any(len({json.dumps(row[key]) for row in group}) > 1 for group in groups)


def _label(row: dict[str, Any], differing: list[str]) -> str:
    texts = {key.replace("_", "-"): _option(key, row[key]) for key in differing if key in row}
    options = [f"{key} {text}" for key, text in texts.items() if text]
    return ", ".join([row["compression"], *options])


def _option(key: str, value: Any) -> str:
    """Nothing for an option that was not given; of leaders, none given means all ranks."""
    if value is None:
        return "all" if key == "leaders" else ""
    return str(value)


def table(results: Sequence[Result]) -> str:
    """The Markdown table."""
    header = (
        "method", "density", "test accuracy", "wire ratio", "steady", "bytes/step", "step ms", "compress ms",
        "replicas equal", "runs",
    )  # fmt: skip
    rows: list[Sequence[str]] = []
    for label, runs in grouped(results):
        rows.append(
            (
                label,
                density(runs),
                _spread(runs, "test_accuracy", "{:.4f}".format),
                _spread(runs, "wire_ratio", "{:.1f}".format),
                _spread(runs, "wire_ratio_last", "{:.1f}".format),
                _spread(runs, "wire_bytes_per_step", "{:,.0f}".format),
                _spread(runs, "step_ms_median", "{:.1f}".format),
                _spread(runs, "compress_ms_median", "{:.2f}".format),
                "yes" if all(run["replicas_equal"] for run in runs) else "NO",
                str(len(runs)),
            )
        )
    return markdown(header, rows)


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """A table; all columns but the first ``left`` are figures, and flush right."""
    rule = ["---"] * left + ["---:"] * (len(header) - left)
    return "\n".join("| " + " | ".join(row) + " |" for row in (header, rule, *rows))


def _spread(runs: list[Result], key: str, text: Callable[[float], str]) -> str:
    """Mean, and half of largest minus smallest where there is any."""
    values = [run[key] for run in runs]
    mean, half = sum(values) / len(values), (max(values) - min(values)) / 2
    return text(mean) + (f" ± {text(half)}" if half else "")


def density(runs: list[Result]) -> str:
    """That of a row; 1 for methods that send every entry."""
    value = runs[0]["config"].get("density", 1)
    return "1" if value == 1 else f"1/{1 / value:.3g}"


def write_csv(results: Sequence[Result], file: Path) -> None:
    """A line per run: the row of the table it belongs to, its figures, and its whole configuration."""
    lines = []
    for label, runs in grouped(results):
        for run in runs:
            figures = {key: value for key, value in run.items() if key not in ("history", "config")}
            lines.append({"method": label, **figures, **run["config"]})
    columns = {key: None for line in lines for key in line}
    with file.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, list(columns), lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)


def name(label: str, runs: list[Result]) -> str:
    """What a row is called where there is no column for its density."""
    share = density(runs)
    return label if share == "1" else f"{label}, {share}"


@contextmanager
def chart(file: Path, rows: int, **settings: Any) -> Iterator[Any]:
    """Axes for so many lines with a legend beside them; written to ``file`` at the end."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(10, 5), layout="constrained")
    axes.set_prop_cycle(color=pyplot.get_cmap("tab10" if rows <= 10 else "tab20").colors)  # type: ignore[attr-defined]
    yield axes
    axes.set(**settings)
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper", fontsize="small")
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=150)
    pyplot.close(figure)


def beside(number: int, count: int) -> tuple[float, float]:
    """Where the ``number``-th of ``count`` bars of a group stands beside the group's middle, and how wide it is."""
    width = 0.8 / count
    return (number - (count - 1) / 2) * width, width


def _curve(axes: Any, label: str, runs: list[Result], x: Callable[[Result, Any], float], key: str) -> None:
    """A row's ``key`` over its epochs: the mean of its seeds, and a band from the least to the largest."""
    # Runs of a row have the same epochs, unless one was cut short.
    entries = [[(x(run, entry), entry[key]) for entry in run["history"] if entry[key] is not None] for run in runs]
    epochs = [list(zip(*epoch, strict=True)) for epoch in zip(*entries, strict=False)]
    where = [sum(xs) / len(xs) for xs, _ in epochs]
    (line,) = axes.plot(where, [sum(ys) / len(ys) for _, ys in epochs], marker=".", label=name(label, runs))
    low, high = [min(ys) for _, ys in epochs], [max(ys) for _, ys in epochs]
    axes.fill_between(where, low, high, color=line.get_color(), alpha=0.2)


def plot(results: Sequence[Result], file: Path) -> None:
    """Test accuracy against the bytes a rank has sent so far, a line per row of the table, a band over its seeds."""
    rows = grouped(results)
    with chart(file, len(rows), xscale="log", xlabel="bytes sent per rank", ylabel="test accuracy") as axes:
        for label, runs in rows:
            _curve(axes, label, runs, lambda _, entry: entry["wire_bytes"], "test_accuracy")


def plot_loss(results: Sequence[Result], file: Path) -> None:
    """Mean training loss of an epoch against the steps at its end, a line per row, a band over its seeds."""
    rows = grouped(results)
    with chart(file, len(rows), yscale="log", xlabel="step", ylabel="training loss, mean of an epoch") as axes:
        for label, runs in rows:
            _curve(axes, label, runs, steps_at, "train_loss")


def steps_at(run: Result, entry: dict[str, Any]) -> float:
    """The steps taken when an entry of the history was made; older runs say the epoch only, at whose end that was."""
    return float(entry.get("step", entry["epoch"] * run["steps"] / run["epochs"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="accuracy against wire bytes")
    parser.add_argument("--csv", type=Path, metavar="FILE.csv", help="a line per run")
    args = parser.parse_args()
    results = [json.loads(file.read_text()) for file in args.files]
    print(table(results))
    if args.plot:
        plot(results, args.plot)
    if args.csv:
        write_csv(results, args.csv)


if __name__ == "__main__":
    main()
