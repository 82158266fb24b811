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
from rich.table import Column, Table

app = typer.Typer(
    name="hvd-compress",
    help="Gradient compression for Horovod and torch DDP: does it work here, and does it help here?",
    no_args_is_help=True,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
console = Console()
_COLUMNS = ("sent MB", "compress ms", "exchange ms", "step ms", "break-even")


@app.callback()
def _main() -> None:
    """Gives every command a name, also while there is only one."""


@app.command()
def doctor(
    timeout: Annotated[float, typer.Option(min=1, help="Seconds for each launch of two ranks.")] = 120,
    exchange: Annotated[bool, typer.Option(help="Launch two ranks.")] = True,
) -> None:
    """Checks the installation: versions, operators, backends, and whether two ranks exchange.

    Exit status 1 if anything is wrong; each fault comes with the command that mends it.
    """
    from .doctor import examine

    with console.status("looking"):
        findings = list(examine(timeout, exchange))
    table = Table("", "found", "")
    for finding in findings:
        table.add_row(finding.item, escape(finding.found), "[red]wrong[/]" if finding.fault else "[green]ok[/]")
    console.print(table)
    faults = [finding for finding in findings if finding.fault]
    for finding in faults:
        console.print(f"[red]{finding.item}:[/] {escape(finding.fault)}", highlight=False)
        console.print(f"  [bold]{escape(finding.cure)}[/]", highlight=False, soft_wrap=True)
    console.print("Something is wrong." if faults else "All is well.")
    raise typer.Exit(1 if faults else 0)


@app.command()
def estimate(
    model: Annotated[str, typer.Option(help="resnet50, vgg16, bert-base, gpt2 or PATH.py:FUNCTION.")],
    ranks: Annotated[int, typer.Option(min=2, max=4096)],
    bandwidth: Annotated[str, typer.Option(help="Of each host's link, as 100mbit or 10gbit; none: unlimited.")],
    latency: Annotated[str, typer.Option(help="From one host to the next, as 50us.")] = "50us",
    optimizer: Annotated[Literal["sgd", "adamw"], typer.Option(help="Leaves out what trains badly with it.")] = "sgd",
    compute_ms: Annotated[float, typer.Option(min=0, help="Forward, backward and update of a step, in ms.")] = 0,
    hosts_share_cores: Annotated[bool, typer.Option(help="All ranks run on this machine's cores (netlab).")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all figures here.")] = None,
) -> None:
    """Step time of dense, fp16 and every method: does compression help on this network, and which?

    Computation is measured now, on this machine's CPU; the network is a model. Exchange is by Gloo.
    """
    from . import estimate as model_of
    from . import network, shapes, transport
    from .kernels import Kernels
    from .wire import METHODS

    try:
        named = shapes.named(model)
        bits, seconds = network.bandwidth(bandwidth), network.duration(latency)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    sizes = [shape for _, shape in named]
    cores = len(os.sched_getaffinity(0)) if hosts_share_cores else None
    kernels, measured = Kernels(sizes, min(cores or 1, ranks)), {}
    with console.status("measuring Gloo") as status:
        net = network.Network(ranks, bits, seconds, transport.measure(), cores)
        for method in METHODS:
            status.update(f"measuring {method}")
            measured[method] = kernels.seconds(method, ranks)
    found = model_of.estimates(model_of.Model(sizes, compute_ms / 1e3), net, measured, optimizer)
    table = Table("method", *(Column(text, justify="right") for text in _COLUMNS))
    best = model_of.winner(found)
    for one in found:
        numbers = [1e3 * one.compress, 1e3 * one.exchange, 1e3 * one.step]
        cells = [f"{one.bytes / 1e6:,.2f}", *(f"{number:,.1f}" for number in numbers), model_of.rate(one.break_even)]
        name = one.method if one.allowed else f"{one.method} *"
        table.add_row(name, *cells, style="bold" if one is best else "" if one.allowed else "dim")
    parameters = sum(math.prod(shape) for shape in sizes)
    console.print(f"{model}: {parameters:,} parameters, {ranks} ranks, {bandwidth}, latency {latency}, {optimizer}")
    console.print(table)
    if optimizer == "adamw":
        console.print("* trains badly with AdamW (docs/choosing.md)", style="dim")
    console.print(model_of.verdict(found, optimizer), highlight=False)
    if json_file:
        rows = [asdict(one) for one in found]
        json_file.write_text(json.dumps({"winner": best.method, "rows": rows}, indent=1) + "\n")
