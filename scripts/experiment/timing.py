"""A model of the time to an accuracy on a network that this machine does not have, from what was measured here."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import table

Result = dict[str, Any]

UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}

WORDS = """\
Time until the test accuracy is {target:.4f}{why}, on networks of the stated bandwidth.

- **Measured**: the steps after which each run first had that accuracy (in a line between two tests, which come once in
  `--eval-every` epochs); the bytes that a rank sends in a step, everything included, mean of the run; the time that
  the compressor itself works in a step ("compress ms", median); and {compute:.2f} ms of compute: the median step of one
  rank alone, which exchanges nothing (forward, backward and update, without loading data).
- **Modelled**: time = steps x (compute + compress + 8 x bytes / bandwidth). No latency, no headers, nothing overlaps,
  every rank has a processor of its own and a link that sends while it receives. Real systems overlap the exchange with
  backward, which helps most where both take about as long.
- **Beware**: all ranks of the runs shared this machine's {cpus} cores, so "compress ms" includes waiting for a core and
  is an upper bound, and "step ms" of the other table depends on what else ran. Times are comparable within one call of
  the script only.
"""


def bandwidth(text: str) -> float:
    """Bits per second from a text such as ``100mbit``."""
    match = re.fullmatch(r"([0-9.]+)([kmg]bit)", text.strip().lower())
    if not match or not float(match[1]) > 0:
        raise ValueError(f"a bandwidth is a number and kbit, mbit or gbit, as 100mbit; got {text!r}")
    return float(match[1]) * UNITS[match[2]]


def step_seconds(compute_ms: float, compress_ms: float, wire_bytes: float, bits_per_second: float) -> float:
    return (compute_ms + compress_ms) / 1000 + 8 * wire_bytes / bits_per_second


def reached(run: Result, target: float) -> tuple[float, float] | None:
    """Steps and seconds until the accuracy was ``target``; None if no test reached it. Between the first test that did
    and the one before, it is taken to rise in a line: else a run just under it at a test would lose all of the time to
    the next, and one that was there at once would have it as late."""
    before = None
    for entry in run["history"]:
        if entry["test_accuracy"] is None:
            continue
        here = entry["test_accuracy"], table.steps_at(run, entry), float(entry["seconds"])
        if here[0] >= target:
            if before is None:
                return here[1:]
            part = (target - before[0]) / (here[0] - before[0])
            steps, seconds = (a + part * (b - a) for a, b in zip(before[1:], here[1:], strict=True))
            return steps, seconds
        before = here
    return None


def steps_to(run: Result, target: float) -> float | None:
    """Steps until then."""
    there = reached(run, target)
    return None if there is None else there[0]


def default_target(results: Sequence[Result]) -> float:
    """What all methods reach that did not diverge: the least final accuracy, mean over seeds, less 0.01."""
    sound = [runs for _, runs in table.grouped(results) if all(math.isfinite(run["train_loss"]) for run in runs)]
    return min(_mean([run["test_accuracy"] for run in runs]) for runs in sound or [results]) - 0.01


def seconds_to(runs: list[Result], target: float, compute_ms: float, bits_per_second: float) -> float | None:
    """The modelled time of a row, mean over its seeds; None where a seed never got there."""
    times = []
    for run in runs:
        steps = steps_to(run, target)
        if steps is None:
            return None
        step = step_seconds(compute_ms, run["compress_ms_median"], run["wire_bytes_per_step"], bits_per_second)
        times.append(steps * step)
    return sum(times) / len(times)


def report(
    results: Sequence[Result], compute_ms: float, bandwidths: Sequence[str], target: float, given: bool, cpus: Any
) -> str:
    """Markdown: in words what the figures are, then the table."""
    why = "" if given else " (the least final accuracy of the methods that did not diverge, mean over seeds, less 0.01)"
    header = ["method", "density", "bytes/step", "compress ms", "reached", "steps", *bandwidths]
    rows = []
    for label, runs in table.grouped(results):
        steps = [count for run in runs if (count := steps_to(run, target)) is not None]
        times = [seconds_to(runs, target, compute_ms, bandwidth(text)) for text in bandwidths]
        rows.append(
            [
                label,
                table.density(runs),
                f"{_mean([run['wire_bytes_per_step'] for run in runs]):,.0f}",
                f"{_mean([run['compress_ms_median'] for run in runs]):.2f}",
                f"{len(steps)} of {len(runs)}",
                f"{_mean(steps):,.0f}" if steps else "-",
                *("-" if time is None else f"{time:.3g} s" for time in times),
            ]
        )
    words = WORDS.format(target=target, why=why, compute=compute_ms, cpus=cpus)
    return words + "\n" + table.markdown(header, rows) + "\n"


def plot(results: Sequence[Result], compute_ms: float, bandwidths: Sequence[str], target: float, file: Path) -> None:
    """The modelled time against the bandwidth, a line per row; rows that did not all reach the target are left out."""
    rows = table.grouped(results)
    values = sorted(map(bandwidth, bandwidths))
    about = {"xlabel": "bandwidth, bits per second", "ylabel": f"modelled seconds to accuracy {target:.4f}"}
    with table.chart(file, len(rows), xscale="log", yscale="log", **about) as axes:
        for label, runs in rows:
            times = [seconds_to(runs, target, compute_ms, value) for value in values]
            if None in times:
                axes.plot([], [])  # takes its colour, so that a row has the same one in all plots
            else:
                axes.plot(values, times, marker="o", label=table.name(label, runs))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
