"""``hvd-compress bench``: launches ranks that measure all methods, and makes the rows of the table, which
``scripts/lab/bench_exchange.py`` prints, too."""

import json
import statistics
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from ..engine.collectives import ring_bytes
from . import launchers
from .methods import BASELINES
from .processes import Failed, exit_on_signals, last_lines, run_group

Row = dict[str, Any]
#: By launcher its host, and the command.
LAUNCHERS = {
    "torchrun": ("ddp", launchers.torchrun),
    "mpirun": ("horovod", launchers.mpirun),
    "horovodrun": ("horovod", launchers.horovodrun),
}


def measure(
    model: str,
    methods: Sequence[str],
    ranks: int,
    launcher: str,
    steps: int = 7,
    timeout: float = 1800.0,
    per_node: int = 1,
    progress: Callable[[int], None] = lambda done: None,
) -> list[Row]:
    """Launches the ranks and waits for them. Returns a row per method (:func:`summary`, :func:`compared`). Raises
    :class:`Failed` if the launch failed, took more than ``timeout`` seconds, or wrote no complete result.

    Args:
        model: see :func:`hvd_compress.cli.shapes.named`.
        methods: names of :data:`hvd_compress.cli.methods.METHODS`.
        launcher: one of LAUNCHERS.
        steps: number of measured steps of each method, fewer if they take more than a minute.
        per_node: ranks of a node; above 1, compressors get ``nodes``.
        progress: called several times a second with the number of methods that have been measured.
    """
    host, command_of = LAUNCHERS[launcher]
    with exit_on_signals(), tempfile.TemporaryDirectory(prefix="hvd-compress.") as folder:
        result, log = Path(folder) / "result.jsonl", Path(folder) / "log"
        options = {"host": host, "model": model, "methods": ";".join(methods), "steps": steps, "result": result}
        options |= {"ranks-per-node": per_node} if per_node > 1 else {}
        module = "hvd_compress.cli.bench_rank", *(f"--{name}={value}" for name, value in options.items())
        command, environment = command_of(ranks, *module)

        def lines() -> list[Row]:
            text = result.read_text() if result.exists() else ""
            return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

        run_group(command, timeout, log, environment, "the launch", watch=lambda: progress(len(lines())))
        if len(found := lines()) != len(methods):
            results = f"results of {len(found)} of {len(methods)} methods"
            raise Failed(f"the launch ended with status 0 and {results}\n{last_lines(log)}")
    return compared([{"method": row["method"], **summary([row])} for row in found])


def summary(runs: Sequence[Row]) -> Row:
    """A row from runs of a method (:meth:`hvd_compress.cli.bench_rank.Bench.measure`): medians over their steps, in ms,
    with the fastest and the slowest. ``exchange_ms``: the time of a step beyond backward and update alone."""
    steps = [ms for run in runs for ms in run["steps_ms"]]
    step = statistics.median(steps)
    found = {key: statistics.median(run[key] for run in runs) for key in ("longest_ms", "alone_ms", "compress_ms")}
    sent = statistics.mean(run["sent_bytes"] for run in runs)
    dense = ring_bytes("allreduce", 4 * runs[0]["entries"], runs[0]["ranks"])
    return {
        "ranks": runs[0]["ranks"],
        "steps": len(steps),
        "step_ms": step,
        "step_ms_spread": [min(steps), max(steps)],
        "step_ms_runs": [statistics.median(run["steps_ms"]) for run in runs],
        **found,
        "exchange_ms": step - found["alone_ms"],
        "sent_bytes": sent,
        "inside_bytes": runs[0]["inside_bytes"],
        "wire_ratio": dense / sent,
        "break_even_gbit_s": break_even(dense - sent, found["compress_ms"]),
        "replicas_equal": all(run["replicas_equal"] for run in runs),
    }


def break_even(saved: float, milliseconds: float) -> float | None:
    """The bandwidth in Gbit/s at which sending ``saved`` bytes takes ``milliseconds``; None if none are saved."""
    return 8e-6 * saved / milliseconds if milliseconds > 0 and saved > 0 else None


def compared(
    rows: Iterable[Row], baselines: Sequence[str] = BASELINES, name: Callable[[str], str] = lambda method: method
) -> list[Row]:
    """The rows with ``speedup`` over the fastest row of ``baselines``; None unless all of them were measured. ``name``:
    returns the method of a row's label."""
    rows = list(rows)
    measured = {name(row["method"]) for row in rows} >= {*baselines}
    base = min(row["step_ms"] for row in rows if name(row["method"]) in baselines) if measured else None
    return [{**row, "speedup": base and base / row["step_ms"]} for row in rows]


def cells(row: Row) -> dict[str, str]:
    """The printed cells of a row, by column."""
    return {
        "method": row["method"],
        "step ms": "{:,.1f} ({:,.1f} to {:,.1f})".format(row["step_ms"], *row["step_ms_spread"]),
        "compress ms": f"{row['compress_ms']:,.1f}",
        "sent MB": f"{row['sent_bytes'] / 1e6:,.2f}",
        "speed-up": "-" if row["speedup"] is None else f"{row['speedup']:.2f}",
        "replicas": "ok" if row["replicas_equal"] else "wrong",
    }
