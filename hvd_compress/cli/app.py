"""The commands and their options."""

from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

app = typer.Typer(
    name="hvd-compress",
    help="Gradient compression for Horovod and torch DDP: does it work here, and does it help here?",
    no_args_is_help=True,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
console = Console()


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
