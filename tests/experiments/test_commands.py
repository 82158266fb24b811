"""Every command in Python starts by its path, as the docs print it."""

import re
import sys
from pathlib import Path

import pytest
from launch import ROOT, finish, start

FILES = [path for room in (".", "lab", "experiments") for path in sorted((ROOT / "scripts" / room).glob("*.py"))]
# Others are for these to import.
COMMANDS = [path for path in FILES if "__main__" in path.read_text()]


@pytest.fixture(scope="module")
def help_of() -> dict[str, tuple[str, int]]:
    """By path: what it printed, and its exit status."""
    driver = Path(__file__).with_name("help_of_all.py")
    output = finish(start([sys.executable, str(driver), *map(str, COMMANDS)], PYTHONPATH=str(ROOT)), 240)
    parts = re.findall(r"(.*?)^(\S+) ended with (-?\d+)$", output, re.MULTILINE | re.DOTALL)
    return {path: (text, int(status)) for text, path, status in parts}


@pytest.mark.parametrize("path", COMMANDS, ids=lambda path: path.name)
def test_help(path: Path, help_of: dict[str, tuple[str, int]]) -> None:
    text, status = help_of[str(path)]
    assert "usage" in text and status == 0, text
