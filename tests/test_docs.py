"""The code in the docs runs."""

import re
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1] / "docs"


def test_your_own_method():
    """The method of the page, and the page's test of it: conservation and bit-equal replicas on 2 and 4 ranks."""
    method, test = re.findall(r"```python\n(.*?)```", (DOCS / "your_own_method.md").read_text(), re.DOTALL)[:2]
    names = {}
    exec(method, names)
    exec(test, names)
    assert sum(bool(line.strip()) for line in method.splitlines()) < 70
