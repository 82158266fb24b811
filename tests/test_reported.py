"""tests/reported.md: each test that it names exists, and runs without --all."""

import ast
import re
from functools import lru_cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
#: What only ``test.sh --scripts`` runs.
SCRIPTS = re.search(r"^scripts=\(([^)]*)\)$", (TESTS.parent / "scripts" / "test.sh").read_text(), re.MULTILINE)
TABLE = (TESTS / "reported.md").read_text()
NAMED = re.findall(r"`([\w/]+\.py)::(\w+)`", TABLE)


@lru_cache
def parsed(file):
    return ast.parse((TESTS / file).read_text())


def is_slow(marks):
    return any("mark.slow" in mark and not mark.startswith("pytest.mark.parametrize") for mark in marks)


def marks_of(node):
    return [ast.unparse(mark) for mark in getattr(node, "decorator_list", ())]


@lru_cache
def starters():
    """Returns the code of the short run's tests that start cases on real ranks. ``names_of()`` leaves out the cases
    that a plan has to name."""
    files = [file for room in ("faults", "parallel", "trainers") for file in sorted((TESTS / room).glob("test_*.py"))]
    nodes = [node for file in files for node in parsed(file).body if not is_slow(marks_of(node))]
    return "\n".join(map(ast.unparse, nodes)).replace("names_of(", "")


def test_every_row_names_a_test():
    rows = [line for line in TABLE.splitlines() if line.startswith("| ") and "| what went wrong |" not in line]
    assert len(rows) > 150
    for row in rows:
        assert len(row.split(" | ")) == 4 and re.search(r"`[\w/]+\.py::\w+` \|$", row), row


def is_a_case(name, tree, marks):
    """Tells whether a decorator, or the table ``CASES`` of its file, makes the function a case on real ranks."""
    tables = [node for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "CASES"]
    return any(mark.partition("(")[0] in ("register", "case", "same_as_stock") for mark in marks) or any(
        isinstance(node, ast.Name) and node.id == name for table in tables for node in ast.walk(table)
    )


@pytest.mark.parametrize(("file", "name"), sorted(set(NAMED)))
def test_the_test_of_a_report_runs_in_the_short_run(file, name):
    assert SCRIPTS is not None and not any(file.startswith(part) for part in re.findall(r'[^\s"]+', SCRIPTS[1]))
    tree, stem = parsed(file), Path(file).stem
    (found,) = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name]
    marks = marks_of(found)
    assert not is_slow([*marks, *(ast.unparse(node.value) for node in tree.body if isinstance(node, ast.Assign))])
    if name.startswith("test_"):
        return
    assert is_a_case(name, tree, marks) and stem in starters()
    if any("named=True" in mark for mark in marks):
        whole = re.search(rf"((?<!\*)[*(]| in ){stem}\.CASES", starters())
        assert whole or f"'{name}'" in starters(), "no plan of the short run names it"
