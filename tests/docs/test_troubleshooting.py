"""docs/troubleshooting.md lists every error message and warning that the package can raise."""

import re
from pathlib import Path

import pytest
from messages import Parts, messages, normalised

ROOT = Path(__file__).resolve().parents[2]
FOUND = messages(ROOT / "hvd_compress")


def listed(parts: Parts, entries: list[str]) -> bool:
    pattern = re.compile(".*?".join(map(re.escape, parts)))
    return any(pattern.search(entry) for entry in entries)


def test_every_message_is_listed():
    """An entry is a line of the page, with an ellipsis where the message has a placeholder."""
    entries = [normalised(line) for line in (ROOT / "docs" / "troubleshooting.md").read_text().splitlines()]
    missing = [f"{where}: {' ... '.join(parts)}" for parts, where in FOUND.items() if not listed(parts, entries)]
    assert not missing, "docs/troubleshooting.md does not list:\n" + "\n".join(missing)


def test_no_message_is_out_of_date():
    """Every message on the page is in the source: the first cell of a table's row, in code."""
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    source = [" ... ".join(parts) for parts in FOUND]
    stale = []
    for message in re.findall(r"^\| `(.+?)` \|", page, re.MULTILINE):
        pieces = [piece for part in message.split("…") if len(piece := normalised(part)) > 2]
        if not any(all(piece in text for piece in pieces) for text in source):
            stale.append(message)
    assert not stale, "no longer in the source:\n" + "\n".join(stale)


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ('raise ValueError("plain text")', ("plain text",)),
        ('raise ValueError(f"at {x} most {y!r:.80}, got {z}")', ("most", "got")),
        ('warnings.warn("a " "b cd", RuntimeWarning)', ("a b cd",)),
        ('self.engine.warn("one text" if x else "two")', ("one text",)),
        ('def f():\n    text = "put together"\n    g(RuntimeError(text))', ("put together",)),
        ('refuse(path, "must be finite")', ("must be finite",)),
        ('raise ValueError("; ".join(filter(None, [x and "one of several"])))', ("one of several",)),
        ('def f():\n    return "from a function"\nraise ValueError(f())', ("from a function",)),
        ("raise error", None),
    ],
)
def test_what_counts_as_a_message(tmp_path, code, expected):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "module.py").write_text(code)
    found = messages(tmp_path / "package")
    assert (expected in found) if expected else not found
