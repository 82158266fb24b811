"""``hvd-compress bench``: whole steps measured on real ranks, all methods in one launch."""

import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from . import launchers
from .processes import Failed, exit_on_signals, last_lines, run_group
from .ranks import serve_store
from .wire import BASELINES

Row = dict[str, Any]
LAUNCHERS = {"torchrun": "ddp", "mpirun": "horovod", "horovodrun": "horovod"}


def measure(
    model: str,
    methods: Sequence[str],
    ranks: int,
    launcher: str,
    host: str,
    hosts: str = "",
    steps: int = 7,
    seconds: float = 60.0,
    timeout: float = 1800.0,
    per_node: int = 1,
    progress: Callable[[int], None] = lambda done: None,
) -> tuple[dict[str, Any], list[Row]]:
    """Launches the ranks and waits for them.

    Args:
        model: see :func:`hvd_compress.cli.shapes.named`.
        methods: names of :data:`hvd_compress.cli.wire.METHODS`.
        ranks: number of ranks. Ignored if the launcher is a command: the command sets the number.
        launcher: one of LAUNCHERS, or a command that takes the arguments of a Python, such as ``srun -n 8 python``.
        host: ``"ddp"`` or ``"horovod"``.
        hosts: of mpirun, as ``a:1,b:1``; rank 0 must run on this machine, or share its folder for temporary files.
        steps: number of measured steps of each method, fewer if they take more than ``seconds``.
        timeout: seconds after which the launch is killed.
        per_node: ranks of a node; above 1, compressors get ``nodes``.
        progress: called with the number of methods that are measured.

    Returns:
        ``ranks``, ``alone_ms`` (backward and update without exchange) and ``alone_processor_ms``, and a row per method
        (:meth:`hvd_compress.cli.bench_rank.Bench.measure`), with ``speedup``, over the faster of dense and fp16 if both
        were measured, else None.

    Raises:
        Failed: the launch failed, took too long, or wrote no complete result.
    """
    with exit_on_signals(), tempfile.TemporaryDirectory(prefix="hvd-compress.") as folder:
        result, log = Path(folder) / "result.jsonl", Path(folder) / "log"
        options = {"host": host, "model": model, "methods": ";".join(methods), "steps": steps, "seconds": seconds}
        options |= {"ranks-per-node": per_node} if per_node > 1 else {}
        store: Any = None
        if launcher not in LAUNCHERS and host == "ddp":
            store, options["store"] = serve_store()
        module = "hvd_compress.cli.bench_rank", *(f"--{name}={value}" for name, value in options.items())
        command, environment = _command(launcher, ranks, hosts, *module, f"--result={result}")

        def lines() -> list[dict[str, Any]]:
            text = result.read_text() if result.exists() else ""
            return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

        run_group(
            command,
            timeout,
            log,
            environment,
            "the launch",
            watch=lambda: progress(max(0, len(lines()) - 1)),
        )
        del store  # served until here
        first, *rows = lines() or [{}]
        if len(rows) != len(methods):
            raise Failed(
                f"the launch ended with status 0 and results of {len(rows)} of {len(methods)} methods. It must start "
                "ranks, and rank 0 must run on this machine or share its folder for temporary files.\n"
                f"{last_lines(log)}"
            )
    steps_of = {row["method"]: row["step_ms"] for row in rows}
    base = min(steps_of[name] for name in BASELINES) if set(BASELINES) <= set(steps_of) else None
    return first, [{**row, "speedup": base and base / row["step_ms"]} for row in rows]


def _command(launcher: str, ranks: int, hosts: str, *module: str) -> tuple[list[str], dict[str, str]]:
    if launcher == "torchrun":
        return launchers.torchrun(ranks, *module)
    if launcher == "mpirun":
        return launchers.mpirun(ranks, *module, hosts=hosts)
    if launcher == "horovodrun":
        return launchers.horovodrun(ranks, *module)
    return launchers.given(launcher, *module)


def plot(rows: Sequence[Row], title: str, file: Path) -> None:
    """Bars of step times, and of the compressor's share. ``ModuleNotFoundError`` without matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 0.8 + 0.35 * len(rows)), layout="constrained")
    names = [row["method"] for row in rows][::-1]
    axes.barh(names, [row["step_ms"] for row in rows][::-1], color="#88ccee", label="step")
    compress = [row["compress_ms"] for row in rows][::-1]
    axes.barh(names, compress, height=0.3, color="#332288", label="compressor, mean over ranks")
    axes.set(xlabel="ms", title=title)
    axes.legend(fontsize="small")
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=150)
    pyplot.close(figure)
