"""docs/check.md has the entries of the guards' docstrings, and the messages that it explains are in the
source."""

import ast
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
import troubleshooting  # noqa: E402

PAGE = troubleshooting.PAGE.read_text()
MESSAGES = [
    message
    for cell in re.findall(r"^\| (`.+?) \|", PAGE.split("## Messages")[1], re.MULTILINE)
    for message in re.findall(r"`(.+?)`", cell)
]


def strings():
    """All literal strings of the package but docstrings, those inside f-strings included."""
    for file in (ROOT / "hvd_compress").rglob("*.py"):
        tree = ast.parse(file.read_text())
        texts = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in texts:
                yield node.value


STRINGS = list(strings())


@pytest.mark.parametrize("message", MESSAGES)
def test_message_is_in_the_source(message):
    """An ellipsis stands for a placeholder."""
    for part in message.split("…"):
        assert any(part.strip() in string for string in STRINGS), part


def test_messages_are_found():
    assert len(MESSAGES) > 40


def test_the_page_is_made_from_the_guards():
    """Otherwise: .venv/bin/python scripts/troubleshooting.py"""
    assert troubleshooting.page() == PAGE


@pytest.mark.parametrize("path", sorted(troubleshooting.GUARDS.glob("*.py")), ids=lambda path: path.stem)
def test_a_guard_says_what_people_do_and_what_helps(path):
    """All but those that only look something up or call others."""
    docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
    raises = any(isinstance(node, ast.Raise) for node in ast.walk(ast.parse(path.read_text())))
    found = list(troubleshooting.entries(docstring))
    assert found or not raises
    assert all({"People", "Cost", "Noticed", "Message", "Cure"} <= entry.keys() for entry in found)
    assert len(re.findall("^(People|Cost|Noticed|Message|Cure):", docstring, re.MULTILINE)) >= 3 * len(found)
