#!/usr/bin/env python3
"""Writes the table of mistakes in docs/check.md from the docstrings of hvd_compress/guards/.

    .venv/bin/python scripts/troubleshooting.py             # tests/docs/test_troubleshooting.py holds the page current

A guard's docstring has fields, each of which may go on in indented lines: People, Cost, Noticed, Message and Cure. A
Cure ends an entry; the next one may leave out People and Cost, which then are those of the one before. The table has
messages and cures; the other fields are for readers of the code. The other parts of the page are written by hand.
"""

import argparse
import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE, GUARDS = ROOT / "docs" / "check.md", ROOT / "hvd_compress" / "guards"
BEGIN, END = "<!-- made by scripts/troubleshooting.py -->\n", "<!-- end -->\n"
COLUMNS = {"Message": "message", "Cure": "cure"}


def entries(docstring: str) -> Iterator[dict[str, str]]:
    """The entries of a docstring, by field."""
    found = dict[str, str]()
    for name, text in re.findall(r"^(People|Cost|Noticed|Message|Cure): (.+(?:\n +.+)*)", docstring, re.MULTILINE):
        found[name] = " ".join(text.split()).removesuffix(".")
        if name == "Cure":
            yield dict(found)


def table(docstrings: Iterable[str]) -> str:
    """The table of all entries, by the first words of their messages."""
    found = [entry for docstring in docstrings for entry in entries(docstring)]
    rows = [f"| {' | '.join(entry[field] for field in COLUMNS)} |" for entry in found]
    head = f"| {' | '.join(COLUMNS.values())} |\n|{'---|' * len(COLUMNS)}\n"
    return head + "".join(f"{row}\n" for row in sorted(rows, key=lambda row: re.sub(r"\W", "", row).lower()))


def page() -> str:
    """The page, with the table as it should be."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    docstrings = [ast.get_docstring(ast.parse(path.read_text())) or "" for path in sorted(GUARDS.glob("*.py"))]
    return before + BEGIN + "\n" + table(docstrings) + "\n" + END + rest.partition(END)[2]


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    PAGE.write_text(page())
