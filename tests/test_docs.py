"""The code in the docs runs."""

import runpy
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1] / "docs"


def test_your_own_method():
    """The method of the page, and its test: conservation and bit-equal replicas on 2 and 4 ranks."""
    file = DOCS / "random_k.py"
    runpy.run_path(str(file))
    method = file.read_text().split("def exchange(compression")[0]
    assert sum(bool(line.strip()) for line in method.splitlines()) < 75
