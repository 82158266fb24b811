"""The command line ``hvd-compress``: does it work here (``doctor``), does it help here (``estimate``, ``bench``). It
needs typer and rich: ``pip install --no-build-isolation '.[cli]'`` in a checkout."""

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
