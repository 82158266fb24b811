"""The messages that docs/troubleshooting.md explains are in the source."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
MESSAGES = [
    message
    for cell in re.findall(r"^\| (`.+?) \|", PAGE.split("## Messages")[1], re.MULTILINE)
    for message in re.findall(r"`(.+?)`", cell)
]


def strings():
    """All literal strings of the package, those inside f-strings included."""
    for file in (ROOT / "hvd_compress").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


STRINGS = list(strings())


@pytest.mark.parametrize("message", MESSAGES)
def test_message_is_in_the_source(message):
    """An ellipsis stands for a placeholder."""
    for part in message.split("…"):
        assert any(part.strip() in string for string in STRINGS), part


def test_messages_are_found():
    assert len(MESSAGES) > 10
