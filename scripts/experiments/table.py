#!/usr/bin/env python3
"""Markdown table of what `train.py --json` wrote, and the look of figures: table.py docs/results/digits/runs.jsonl

All runs are of one data set. Runs that differ only in the seed share a row: mean ± half the range.
"""

import json
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from experiment import compressors
from experiment.files import script_parser
from experiment.quality import metric_of
from experiment.result_file import Result, read_runs
from tabulate import tabulate

# What may differ between the runs of a row: the seed, and what cannot change the outcome.
NOT_A_SETTING = {
    "seed", "json", "trace", "data_dir", "eval_every", "python", "torch", "horovod", "hvd_compress", "git_commit",
    "cpus", "cpu_capability", "settings", "threads_per_rank",
    # Options of earlier versions, which all runs had at the value that is a constant now.
    "sample", "reselect", "floor", "compensation", "warm_start",
}  # fmt: skip


def settings(result: Result) -> dict[str, str]:
    """What makes two runs comparable: the configuration without NOT_A_SETTING, and the number of ranks."""
    config = {**result["config"], "ranks": result["ranks"]}
    return {key: str(value) for key, value in config.items() if key not in NOT_A_SETTING and value is not None}


def grouped(results: Sequence[Result]) -> list[tuple[str, list[Result]]]:
    """Rows: (label, runs), in order of first appearance. The label says where a row differs from the others."""
    groups: dict[str, list[Result]] = {}
    for result in results:
        groups.setdefault(json.dumps(settings(result), sort_keys=True), []).append(result)
    rows = [settings(runs[0]) for runs in groups.values()]

    def distinct(key: str, among: Sequence[dict[str, str]]) -> int:
        return len({row.get(key) for row in among})

    def label(row: dict[str, str]) -> str:
        """An option of the method is named where it differs between rows of that method, others where rows differ."""
        options = compressors.METHODS[row["compression"]].defaults()
        same = [other for other in rows if other["compression"] == row["compression"]]
        different = [
            f"{key.replace('_', '-')} {value}"
            for key, value in row.items()
            if key not in ("compression", "density") and distinct(key, same if key in options else rows) > 1
        ]  # fmt: skip
        return ", ".join([row["compression"], *different])

    return list(zip(map(label, rows), groups.values(), strict=True))


def table(results: Sequence[Result]) -> str:
    """The Markdown table; below it, the rows whose replicas differ."""
    groups = grouped(results)
    unequal = [label for label, runs in groups if not all(run["replicas_equal"] for run in runs)]
    return markdown([row(*group) for group in groups]) + "".join(f"\n\nReplicas differ: {label}." for label in unequal)


def row(label: str, runs: list[Result]) -> dict[str, str]:
    """Its cells by column."""
    metric = metric_of(runs[0])
    return {
        "method": label,
        "density": density(runs),
        metric.label: _spread(runs, metric.key, ".4f") + (f" ({len(runs)})" if len(runs) > 1 else ""),
        "train loss": _spread(runs, "train_loss", ".3f"),
        "wire ratio": _spread(runs, "wire_ratio", ".1f"),
        "step ms": _spread(runs, "step_ms_median", ".1f"),
        "compress ms": _spread(runs, "compress_ms_median", ".2f"),
    }


def markdown(rows: Sequence[dict[str, Any]], left: int = 1) -> str:
    """A table of dicts with the same keys; all columns but the first ``left`` are aligned right."""
    alignment = ["left"] * left + ["right"] * (len(rows[0]) - left)
    return tabulate(rows, headers="keys", tablefmt="pipe", disable_numparse=True, colalign=alignment, missingval="-")


def _spread(runs: list[Result], key: str, form: str) -> str:
    """The mean, and half of the range where there is any."""
    values = [run[key] for run in runs]
    half = (max(values) - min(values)) / 2
    return format(statistics.fmean(values), form) + (f" ± {half:{form}}" if half > 0 else "")


def density(runs: list[Result]) -> str:
    """Of a row; 1 for methods that send every entry."""
    value = runs[0]["config"].get("density", 1)
    return "1" if value == 1 else f"1/{1 / value:.3g}"


#: Okabe and Ito's colours, which colour-blind readers tell apart, without the yellow, which is faint on white.
COLOURS = ("#000000", "#56B4E9", "#0072B2", "#009E73", "#D55E00", "#E69F00", "#CC79A7")
MARKERS = "osD^vPX"
DASHES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (8, 3)), (0, (3, 1)))
HATCHES = ("", "//", "..", "xx", "\\\\", "oo", "++")


@contextmanager
def chart(file: Path, **settings: Any) -> Iterator[Any]:
    """Axes with a legend beside them, written to ``file`` at the end: readable at half size. Lines also differ in
    dashes and markers."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    look = {"font.size": 14, "lines.linewidth": 2.2, "lines.markersize": 8, "hatch.linewidth": 0.6}
    with pyplot.rc_context(look):
        figure, axes = pyplot.subplots(figsize=(10, 5), layout="constrained")
        axes.set_prop_cycle(color=COLOURS, linestyle=DASHES, marker=list(MARKERS))
        yield axes
        axes.set(**settings)
        axes.grid(alpha=0.3)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        if axes.get_legend():
            axes.get_legend().remove()
        figure.legend(loc="outside right upper", frameon=False)
        file.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(file, dpi=100)
        pyplot.close(figure)


def steps_at(run: Result, entry: dict[str, Any]) -> float:
    """The steps taken when an entry of the history was made; older runs record the epoch only."""
    return float(entry.get("step", entry["epoch"] * run["steps"] / run["epochs"]))


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE.jsonl")
    args = parser.parse_args()
    results = [run for file in args.files for run in read_runs(file).values()]
    print(table(results))


if __name__ == "__main__":
    main()
