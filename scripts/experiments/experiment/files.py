"""Command lines and files of all scripts."""

import argparse
import json
from pathlib import Path
from typing import Any


def script_parser(description: str | None, **options: Any) -> argparse.ArgumentParser:
    """A parser that shows a script's docstring unchanged, and takes no abbreviations."""
    raw = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(description=description, formatter_class=raw, allow_abbrev=False, **options)


def write_json(file: Path, content: Any) -> None:
    """Writes the file, with its folder."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content, indent=1) + "\n")


def plain(options: dict[str, Any]) -> dict[str, Any]:
    """Options as JSON can hold them."""
    return {name: str(value) if isinstance(value, Path) else value for name, value in options.items()}
