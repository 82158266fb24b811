"""The commands and their options."""

import json
import math
import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Column, Table

from .._version import __version__

HELP = "Gradient compression for Horovod, torch DDP and FSDP2: does it work here, and does it help here?"
app = typer.Typer(
    name="hvd-compress",
    no_args_is_help=True,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
console = Console()
_COLUMNS = ("sent MB", "trips", "compress ms", "exchange ms", "step ms", "break-even")


def _finite(number: float) -> float:
    if not math.isfinite(number):
        raise typer.BadParameter(f"must be finite, got {number}")
    return number


Model = Annotated[str, typer.Option(help="The model: resnet50, gpt2, or PATH.py:FUNCTION, which returns yours.")]
RanksPerNode = Annotated[int, typer.Option(min=1, help="Ranks of a host; above 1, compressors get nodes=.")]
Timeout = Annotated[float, typer.Option(min=1, callback=_finite, help="Time limit of each launch, in seconds.")]
JsonFile = Annotated[Path | None, typer.Option("--json", dir_okay=False, help="File to write all figures to, as JSON.")]


def _print_version(asked: bool) -> None:
    if asked:
        console.print(f"hvd-compress {__version__}", highlight=False)
        raise typer.Exit


@app.callback(help=HELP)
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """The options of ``hvd-compress`` itself."""


def _nodes(ranks: int, per_node: int) -> int:
    """The number of nodes. Raises ``BadParameter`` if they are not full, or fewer than two."""
    if ranks % per_node or ranks // per_node < 2:
        raise typer.BadParameter(f"--ranks must be at least two times --ranks-per-node, and a multiple, got {ranks}")
    return ranks // per_node


def _make_folder(file: Path | None) -> None:
    """Makes the folder of an output file before a measurement, so that a wrong path does not lose it."""
    if file is not None:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise typer.BadParameter(f"cannot make the folder of {file}: {error}") from None


@app.command()
def doctor(
    timeout: Timeout = 120,
    exchange: Annotated[bool, typer.Option(help="Launch two ranks that exchange gradients.")] = True,
    network: Annotated[
        bool, typer.Option("--network", help="Check the network between ranks that torchrun has started, and only it.")
    ] = False,
) -> None:
    """Checks the installation: versions, operators, backends, and whether two ranks exchange.

    Exit status 1 if anything is wrong. Each fault is printed with the command that repairs it, or with one that shows
    more about it.
    """
    from .doctor import between_ranks, examine
    from .ranks import Ddp

    if network and int(os.environ.get("WORLD_SIZE", "1")) < 2:
        raise typer.BadParameter("--network is for two ranks or more: torchrun ... -m hvd_compress doctor --network")
    host = Ddp() if network else None
    with console.status("checking"):
        findings = list(examine(timeout, exchange)) if host is None else between_ranks(host)
    if host is not None and host.rank:
        host.close()
    table = Table("", "found", "")
    for finding in findings:
        table.add_row(finding.item, escape(finding.found), "[red]wrong[/]" if finding.fault else "[green]ok[/]")
    console.print(table)
    faults = [finding for finding in findings if finding.fault]
    for finding in faults:
        console.print(f"[red]{finding.item}:[/] {escape(finding.fault)}", highlight=False)
        console.print(f"  [bold]{escape(finding.cure)}[/]", highlight=False, soft_wrap=True)
    console.print("Something is wrong." if faults else "All is well.")
    if host is not None:
        host.close(min(1, len(faults)))
    raise typer.Exit(min(1, len(faults)))


@app.command()
def estimate(
    model: Model,
    ranks: Annotated[int, typer.Option(min=2, max=4096, help="Number of ranks.")],
    bandwidth: Annotated[str, typer.Option(help="Rate of each host's upload, as 100mbit or 10gbit; none: unlimited.")],
    round_trip: Annotated[str, typer.Option(help="Between two hosts, as ping measures it: 50ms, or 100us.")] = "100us",
    optimizer: Annotated[
        Literal["sgd", "adamw", "muon"],
        typer.Option(help="Your optimizer. Only methods that train well with it, or in its place, are recommended."),
    ] = "sgd",
    compute_ms: Annotated[
        float,
        typer.Option(
            min=0, callback=_finite, help="Time of forward, backward and update in ms; without it, upper bounds follow."
        ),
    ] = 0,
    local_steps: Annotated[
        int | None,
        typer.Option(min=1, help="Steps between two exchanges of every method; by default 3 of low_bit, otherwise 1."),
    ] = None,
    ranks_per_node: RanksPerNode = 1,
    inside: Annotated[
        str, typer.Option(help="Rate of each rank's connection inside a host, as 200gbit; none: unlimited.")
    ] = "none",
    json_file: JsonFile = None,
) -> None:
    """Step time of dense, fp16 and every method: does compression help on this network, and which?

    With --ranks-per-node, methods work on two levels (docs/nodes.md): sent are the bytes of a host's link.
    Computation is measured now, on this machine's CPU; the network is a model of its links.
    """
    from . import estimate as model_of
    from . import network, shapes
    from .kernels import Kernels
    from .methods import METHODS

    try:
        named = shapes.named(model)
        bits, seconds = network.bandwidth(bandwidth), network.duration(round_trip)
        inside_bits = network.bandwidth(inside)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if inside != "none" and ranks_per_node == 1:
        raise typer.BadParameter("--inside is of the connection between the ranks of a host: give --ranks-per-node")
    _make_folder(json_file)
    sizes = [shape for _, shape in named]
    kernels, measured, nodes = Kernels(sizes), {}, _nodes(ranks, ranks_per_node)
    net = network.Network(bits, seconds, ranks_per_node, inside_bits)
    with console.status("measuring") as status:
        # Local steps take neither signs, which DeMo gives, nor momentum, which DGC has.
        for method in (name for name in METHODS if not local_steps or not name.startswith(("DeMo", "DGC"))):
            status.update(f"measuring {method}")
            measured[method] = kernels.measure(method, nodes, ranks_per_node)
    found = model_of.estimates(model_of.Model(sizes, compute_ms / 1e3), net, measured, optimizer, local_steps)
    table = Table("method", *(Column(text, justify="right") for text in _COLUMNS))
    best = model_of.winner(found, optimizer)
    for one in found:
        numbers = [f"{1e3 * seconds:,.1f}" for seconds in (one.compress, one.exchange, one.step)]
        cells = [f"{one.bytes / 1e6:,.2f}", f"{one.trips}", *numbers, model_of.rate(one.break_even)]
        name = one.method if one.allowed else f"{one.method} *"
        table.add_row(name, *cells, style="bold" if one is best else "" if one.allowed else "dim")
    parameters = sum(math.prod(shape) for shape in sizes)
    where = f"{ranks} ranks" + (f" on {nodes} nodes" if ranks_per_node > 1 else "")
    console.print(f"{model}: {parameters:,} parameters, {where}, {bandwidth}, round trip {round_trip}, {optimizer}")
    console.print(table)
    megabytes = ", ".join(f"{one.method} {one.memory / 1e6:,.0f}" for one in found if one.memory)
    console.print(f"MB of memory on a rank, beside weights and gradients: {megabytes}", highlight=False)
    if ranks_per_node > 1:
        milliseconds = 1e3 * max(one.inside for one in found)
        console.print(f"A step of a method spends {milliseconds:,.1f} ms of its exchange inside the nodes.")
    if several := [one for one in found if one.local_steps > 1]:
        who = several[0].method if len(several) == 1 else "all but dense and fp16"
        console.print(f"{who}: one exchange in {several[0].local_steps} steps, means over these", style="dim")
    if optimizer != "sgd":
        console.print(f"* not advised with {optimizer} (docs/choosing.md)", style="dim")
    sentences = model_of.verdict(found, optimizer, not compute_ms), model_of.bound_by_delay(best, net)
    console.print(*filter(None, sentences), sep="\n", highlight=False)
    if json_file:
        rows = [asdict(one) for one in found]
        json_file.write_text(json.dumps({"winner": best.method, "rows": rows}, indent=1) + "\n")


@app.command()
def bench(
    model: Model = "resnet50",
    ranks: Annotated[int, typer.Option(min=2, help="Number of ranks, all on this machine.")] = 2,
    methods: Annotated[
        str,
        typer.Option(
            help="Methods to measure, by their names in the table of estimate, joined by semicolons. low_bit needs one "
            "rank a node."
        ),
    ] = "",
    launcher: Annotated[
        Literal["torchrun", "mpirun", "horovodrun"],
        typer.Option(help="What starts the ranks: torchrun (DDP), mpirun or horovodrun (Horovod)."),
    ] = "torchrun",
    ranks_per_node: RanksPerNode = 1,
    steps: Annotated[int, typer.Option(min=1, help="Number of measured steps of each method.")] = 7,
    timeout: Timeout = 1800,
    json_file: JsonFile = None,
) -> None:
    """Measures whole steps on real ranks, method by method, with gradients of the model's shapes.

    A step is backward without computation, exchange and update. Exit status 1 if a launch fails or replicas differ.
    """
    from . import bench as measurement
    from . import shapes
    from .methods import METHODS
    from .processes import Failed

    names = (methods or ("dense;fp16;low_bit;DeMo;IWP" if ranks_per_node == 1 else "dense;fp16;DeMo;IWP")).split(";")
    if unknown := [name for name in names if name not in METHODS]:
        raise typer.BadParameter(f"unknown method {unknown[0]!r}; known: {'; '.join(METHODS)}")
    if ranks_per_node > 1 and "low_bit" in names:
        raise typer.BadParameter("low_bit is measured with --ranks-per-node 1: a node then is what a rank is")
    try:
        shapes.named(model)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    _nodes(ranks, ranks_per_node)
    _make_folder(json_file)
    try:
        with Progress(console=console, transient=True) as bar:
            task = bar.add_task("measuring", total=len(names))
            rows = measurement.measure(
                model, names, ranks, launcher, steps, timeout, ranks_per_node,
                lambda done: bar.update(task, completed=done, description=[*names, "closing"][done]),
            )  # fmt: skip
    except (Failed, OSError) as error:
        console.print(f"[red]failed:[/] {escape(str(error))}", highlight=False)
        raise typer.Exit(1) from None
    shown = [measurement.cells(row) for row in rows]
    table = Table(*(Column(name, justify="left" if name == "method" else "right") for name in shown[0]))
    for row in shown:
        table.add_row(*row.values(), style="red" if row["replicas"] != "ok" else "")
    averages, alone = measurement.LAUNCHERS[launcher][0], rows[0]["alone_ms"]
    console.print(f"{model}, {ranks} ranks of {averages} by {launcher}; without exchange {alone:.1f} ms")
    console.print(table)
    if json_file:
        json_file.write_text(json.dumps({"model": model, "host": averages, "rows": rows}, indent=1) + "\n")
    raise typer.Exit(0 if all(row["replicas_equal"] for row in rows) else 1)
