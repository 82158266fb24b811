"""tests/reported.md: each test that it names exists, and runs without --all."""

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
#: What only ``test.sh --scripts`` runs.
SCRIPTS = re.search(r"^scripts=\((.*)\)$", (TESTS.parent / "scripts" / "test.sh").read_text(), re.MULTILINE)
NAMED = re.findall(r"`([\w/]+\.py)::(\w+)`", (TESTS / "reported.md").read_text())


def test_every_row_names_a_test():
    rows = [line for line in (TESTS / "reported.md").read_text().splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 30 and all("::" in row for row in rows)


@pytest.mark.parametrize(("file", "name"), sorted(set(NAMED)))
def test_the_test_of_a_report_runs_in_the_short_run(file, name):
    assert SCRIPTS is not None and not any(file.startswith(part) for part in SCRIPTS[1].split())
    tree = ast.parse((TESTS / file).read_text())
    (found,) = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name]
    marks = [ast.unparse(mark) for mark in found.decorator_list]
    whole = [ast.unparse(node.value) for node in tree.body if isinstance(node, ast.Assign)]
    assert not any("mark.slow" in mark and not mark.startswith("pytest.mark.parametrize") for mark in [*marks, *whole])
    assert name.startswith("test_") or any(mark.startswith("register(") for mark in marks)
