"""The command line ``hvd-compress``: what works here (``doctor``), what a method would gain (``estimate``), what it
gains (``bench``). It needs typer and rich, which the extra ``cli`` installs:
``pip install --no-build-isolation '.[cli]'`` in a checkout."""

import shlex
import sys


def main() -> None:
    """Runs the command line; exit status 1 without typer and rich."""
    try:
        import rich
        import typer
    except ModuleNotFoundError as error:
        sys.exit(f"hvd-compress needs {error.name}: {shlex.quote(sys.executable)} -m pip install typer rich")
    from .app import app

    app(prog_name="hvd-compress")
