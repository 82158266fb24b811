#!/usr/bin/env python3
"""What overlaps with backward in a step: a table and a plot of the last step of a trace.

    run.sh 4 scripts/experiments/train.py --model vgg11 ... --compression iwp --max-steps 30 --trace trace.json
    timeline.py trace.json --plot timeline.png

The trace itself opens in chrome://tracing or ui.perfetto.dev. "in flight" is the time of all messages, summed over
buckets, from their start until the compressor polled them as done; "hidden" is the part of it during backward;
"exposed" is the time from the end of backward to the end of the last message."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import table
from experiment.files import script_parser
from experiment.trace import Trace


def last_step(spans: Sequence[dict[str, Any]]) -> pd.DataFrame:
    """The spans of the last step: row, name, begin and end in milliseconds after the step's begin. Raises
    ``ValueError`` if there is none."""
    frame = pd.DataFrame(spans, columns=["tid", "name", "ts", "dur"]).rename(columns={"tid": "row"})
    steps = frame[frame["name"] == Trace.STEP]
    if steps.empty:
        raise ValueError("no step in this trace: was the training over before the steps that are recorded?")
    frame = frame[(frame["ts"] >= steps["ts"].iloc[-1]) & (frame["name"] != Trace.STEP)].copy()
    frame["begin"] = (frame["ts"] - steps["ts"].iloc[-1]) / 1e3
    frame["end"] = frame["begin"] + frame["dur"] / 1e3
    return frame[["row", "name", "begin", "end"]]


def figures(step: pd.DataFrame) -> dict[str, float]:
    """Milliseconds by what they were spent on. With several backward passes a step, messages follow the last."""
    length = step["end"] - step["begin"]
    model = step["row"] == Trace.MODEL
    end = step[step["name"] == "backward"]["end"].max()
    flights = step[step["row"].str.startswith("bucket")]
    in_hooks = (step["row"] == Trace.COMPRESSOR) & (step["name"] == "compress") & (step["begin"] < end)
    found = {
        **length[model].groupby(step["name"], sort=False).sum(),
        "compress, in backward": length[in_hooks].sum(),
        "in flight": (flights["end"] - flights["begin"]).sum(),
        "hidden": (flights["end"].clip(upper=end) - flights["begin"]).clip(lower=0).sum(),
        "exposed": max(0.0, flights["end"].max() - end) if len(flights) else 0.0,
        "whole step": step["end"].max(),
    }
    return {name: float(value) for name, value in found.items()}


def plot(step: pd.DataFrame, file: Path) -> None:
    """A line for the model, the compressor and each bucket, from left to right."""
    buckets = sorted(set(step["row"]) - {Trace.MODEL, Trace.COMPRESSOR}, key=lambda row: int(row.split()[1]))
    rows = [Trace.MODEL, Trace.COMPRESSOR, *buckets]
    groups = step.groupby(step["name"].str.partition(",")[0], sort=False)
    with table.chart(file, xlabel="ms since the step began") as axes:
        for name, mine in groups:
            places = [rows.index(row) for row in mine["row"]]
            axes.barh(places, mine["end"] - mine["begin"], left=mine["begin"], height=0.7, label=name)
        axes.set_yticks(range(len(rows)), labels=rows)
        axes.invert_yaxis()


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--plot", type=Path, metavar="FILE.png")
    args = parser.parse_args()
    try:
        step = last_step(json.loads(args.trace.read_text())["traceEvents"])
    except ValueError as error:
        parser.error(str(error))
    print(table.markdown([{"of one step": name, "ms": f"{ms:.1f}"} for name, ms in figures(step).items()]))
    if args.plot:
        plot(step, args.plot)


if __name__ == "__main__":
    main()
