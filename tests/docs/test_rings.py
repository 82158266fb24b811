"""Each stored run names a commit of this repository, and pages say what was measured with an older ring."""

import re
from pathlib import Path

import pytest
import rings
import stated

ROOT = Path(__file__).resolve().parents[2]
MISSING = rings.missing()
if MISSING:
    pytest.skip(MISSING, allow_module_level=True)

ROWS = list(rings.rows())
#: Runs of code that is not in this repository, or was not recorded: they name the commit that stored them.
STORED = {"ranks-apart": 231, "demo-subtract": 13, "cifar10-budgets": 3}


def test_each_run_has_a_commit_of_this_repository():
    assert len(ROWS) > 700
    wrong = [(row.experiment, row.run.get("name"), row.commit) for row in ROWS if row.commit not in rings.commits()]
    assert wrong == []


def test_results_says_which_runs_recorded_none():
    """A new run has to record the commit of its code: these are counted."""
    page = stated.page("results")
    for experiment in {row.experiment for row in ROWS}:
        without = sum("stored" in row.run for row in ROWS if row.experiment == experiment)
        assert without == STORED.get(experiment, 0), experiment
        assert not without or f"`{experiment}`" in page
    assert f"{sum(STORED.values())} runs" in page


@pytest.mark.parametrize(("method", "config", "ring"), [
    ("demo", {"exchange": "ring"}, "A"), ("demo", {"exchange": "gather"}, ""), ("ddp-demo@gather-nodes", {}, ""),
    ("ddp-quantized@few", {}, "A"), ("low_bit", {}, "A"), ("iwp", {"values": "lanes4"}, ""), ("none", {}, ""),
    ("iwp", {"values": "lloyd4"}, "A"), ("topk", {"values": "range10-gather"}, ""), ("demo", {"values": "fp16"}, ""),
])  # fmt: skip
def test_ring_of_a_run(method, config, ring):
    change = rings.CHANGES["B"]
    before, after = (rings.git("rev-parse", name) for name in (f"{change}^", change))
    for commit, found in ((before, ring), (f"{after}-dirty", ring and "B"), (rings.CHANGES["C"], ring and "C")):
        assert rings.Row("any", {"config": {**config, "git_commit": commit}}, method).ring == found


def test_page_of_older_rings_is_current():
    assert rings.page() == rings.PAGE.read_text(), "run scripts/experiments/rings.py"


def test_stated_figures_have_the_day_of_their_code():
    assert stated.listed() == stated.PAGE.read_text(), "run scripts/experiments/stated.py --write"


OLDER = [
    (page, words.replace("{}", printed), source.ring)
    for page, words, printed, source in stated.checked()
    if set(source.ring) - {"C"}
]


@pytest.mark.parametrize(("page", "words", "ring"), OLDER, ids=[f"{page}: {words}" for page, words, _ in OLDER])
def test_page_says_that_a_figure_is_of_an_older_ring(page, words, ring):
    """In its row or in the head of its table, or in its paragraph."""
    file = ROOT / ("README.md" if page == "README" else f"docs/{page}.md")
    pattern = re.escape(words).replace("…", r"[\d,]+")
    (around,) = [part for part in file.read_text().split("\n\n") if re.search(pattern, " ".join(part.split()))]
    if around[:1] == "|":
        head, _, *rows = around.splitlines()
        around = head + next(row for row in rows if re.search(pattern, row))
    assert all(re.search(rf"(?i)ring {name}\b", " ".join(around.split())) for name in ring.split(", ")), around
