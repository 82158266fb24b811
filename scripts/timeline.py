#!/usr/bin/env python3
"""What hides behind what in a step: a table and a picture of the last step of a trace.

    run.sh 4 scripts/train.py --model vgg11 ... --compression iwp --max-steps 30 --trace trace.json
    timeline.py trace.json --plot docs/results/timeline.png

The trace itself opens in chrome://tracing or ui.perfetto.dev. "in flight" is how long messages were under way, the
buckets' times added up, from their start until the compressor saw them done; "hidden" is the part of that during
backward; "exposed" is what is left of the step's messages after backward ended.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import table
from experiment.trace import Trace

Span = dict[str, Any]


def last_step(spans: Sequence[Span]) -> list[Span]:
    """Those of the last step, in milliseconds after its begin. Raises ``ValueError`` if there is none."""
    starts = [span["ts"] for span in spans if span["name"] == Trace.STEP]
    if not starts:
        raise ValueError("no step in this trace: was the training over before the steps that are recorded?")
    start = starts[-1]
    chosen = [span for span in spans if span["ts"] >= start and span["name"] != Trace.STEP]
    return [{**span, "ts": (span["ts"] - start) / 1e3, "dur": span["dur"] / 1e3} for span in chosen]


def figures(step: Iterable[Span]) -> dict[str, float]:
    """Milliseconds, by what they were spent on. With several backward passes a step, messages follow the last."""
    spans = list(step)
    model: dict[str, float] = {}
    end = 0.0
    for span in spans:
        if span["tid"] == Trace.MODEL:
            model[span["name"]] = model.get(span["name"], 0.0) + span["dur"]
        if span["name"] == "backward":
            end = span["ts"] + span["dur"]
    flights = [span for span in spans if span["tid"].startswith("bucket")]
    ends = [span["ts"] + span["dur"] for span in flights]
    in_hooks = [s for s in spans if s["tid"] == Trace.COMPRESSOR and s["name"] == "compress" and s["ts"] < end]
    return {
        **model,
        "compress, in backward": sum(span["dur"] for span in in_hooks),
        "in flight": sum(span["dur"] for span in flights),
        "hidden": sum(max(0.0, min(last, end) - span["ts"]) for span, last in zip(flights, ends, strict=True)),
        "exposed": max(0.0, max(ends, default=end) - end),
        "whole step": max(span["ts"] + span["dur"] for span in spans),
    }


def plot(step: Sequence[Span], file: Path) -> None:
    """A line a row, from left to right."""
    buckets = sorted({s["tid"] for s in step} - {Trace.MODEL, Trace.COMPRESSOR}, key=lambda row: int(row.split()[1]))
    rows = [Trace.MODEL, Trace.COMPRESSOR, *buckets]
    names = list(dict.fromkeys(span["name"].partition(",")[0] for span in step))
    with table.chart(file, len(names), xlabel="ms since the step began") as axes:
        for name in names:
            mine = [span for span in step if span["name"].partition(",")[0] == name]
            where, widths = [span["ts"] for span in mine], [span["dur"] for span in mine]
            axes.barh([rows.index(span["tid"]) for span in mine], widths, left=where, height=0.7, label=name)
        axes.set_yticks(range(len(rows)), labels=rows)
        axes.invert_yaxis()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--plot", type=Path, metavar="FILE.png")
    args = parser.parse_args()
    try:
        step = last_step(json.loads(args.trace.read_text())["traceEvents"])
    except ValueError as error:
        parser.error(str(error))
    print(table.markdown(["of one step", "ms"], [[name, f"{ms:.1f}"] for name, ms in figures(step).items()]))
    if args.plot:
        plot(step, args.plot)


if __name__ == "__main__":
    main()
