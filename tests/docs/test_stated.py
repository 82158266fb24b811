"""What README and the pages state is what the stored runs give: scripts/experiments/stated.py lists each."""

import re
from pathlib import Path

import figures
import hours
import pytest
import stated

ROOT = Path(__file__).resolve().parents[2]
RESULTS = (ROOT / "docs" / "results.md").read_text()
FOUND = list(stated.checked())


@pytest.mark.parametrize(("page", "words", "printed", "source"), FOUND, ids=[f"{name}: {w}" for name, w, *_ in FOUND])
def test_figure_is_what_was_measured(page, words, printed, source):
    assert printed, f"{page} does not say {words!r}"
    assert stated.holds(printed, source), f"{page}: {words.format(printed)}, but {source}"


def test_wrong_figures_are_found():
    source = stated.Source("", 1.90143)
    assert stated.holds("1.901", source) and stated.holds("1.90", source)
    assert not stated.holds("1.902", source) and not stated.holds("", source)
    assert stated.over(stated.LOW_BIT, stated.DENSE).value == pytest.approx(0.87, abs=0.01)


def test_losses_over_dense_are_those_of_the_rows():
    """The fourth column of the first table of results.md."""
    checked = 0
    for page, words, printed, source in FOUND:
        row = re.escape(words.format(printed)) + r"(?:3 seeds\) \|)? ?\|? ?(\S+) % \|"
        of_first = page == "results" and re.search(r"\| \d+ \| \{\} [(|]", words) and "| 1 |" not in words
        if of_first and (found := re.search(row, stated.page("results"))):
            percent = stated.over(source, stated.DENSE).value
            assert f"{percent:.{len(found[1].partition('.')[2])}f}" == found[1], words
            checked += 1
    assert checked >= 15


#: A figure of quality, as pages print it.
QUALITY = re.compile(r"(?<![\d.])(?:0\.[4-9]|[1-3]\.\d)\d{2,3}(?![\d.])")


@pytest.mark.parametrize("name", ["README", "choosing", "results"])
def test_no_figure_is_without_a_row(name):
    """But for those of simulations and of sparse methods with AdamW, which other tests compare."""
    text = stated.page(name)
    tables = (ROOT / "docs" / "results" / "ranks-apart" / "tables.md").read_text()
    with_row = {printed for page, _, printed, _ in FOUND if page == name}
    adamw = (figures.RESULTS / "gpt-adamw" / "table.md").read_text()
    budgets = {f"{run['test_accuracy']:.4f}" for run in figures.read(figures.RESULTS, "cifar10-budgets").values()}
    budgets |= {f"{run['test_accuracy']:.4f}" for run in figures.read(figures.RESULTS, "cifar10-signs/4").values()}
    for figure in set(QUALITY.findall(text)) - with_row:
        average = figure in {"0.7730", "0.7722", "0.7686", "0.7620", "0.7592"}  # see the next test
        assert figure in tables or figure in adamw or figure in budgets or average, figure


def test_means_of_the_table_of_equal_bytes():
    equal = RESULTS.split("## SGD")[1].replace("| IWP, ", "| other IWP, ")
    for words, run in {"DGC (bytes": "dgc", "TopK, likewise": "topk", "FFT": "fft", "IWP": "iwp-lanes4"}.items():
        (printed,) = re.findall(rf"^\| {re.escape(words)}[^|]*\| (\S+)\* ", equal, re.MULTILINE)
        assert stated.holds(printed, stated.quality("cifar10-budgets", f"64-{run}")), words
    source = stated.quality("cifar10-budgets", *(f"64-iwp-waiting-{seed}" for seed in range(3)))
    assert stated.holds("0.7592", source)


def test_simulated_rows_are_those_of_the_tables():
    tables = {cells(line) for line in (ROOT / "docs/results/ranks-apart/tables.md").read_text().splitlines()}
    rate = [cells(line) for line in RESULTS.splitlines() if re.match(r"\| (nano)?gpt, ", line)]
    assert len(rate) >= 6
    assert [row for row in rate if not any(row == other[: len(row)] for other in tables)] == []
    sent = [
        cells(line) for line in RESULTS.split("## Many ranks")[1].splitlines() if re.match(r"\| (weights|matr)", line)
    ]
    assert len(sent) >= 3
    for what, ranks, fewer, bits, over in sent:
        assert any(
            (what, ranks, fewer) == other[:3] and other[4].startswith(bits) and other[5] == over
            for other in tables
            if len(other) > 5
        ), what


def cells(line):
    return tuple(cell.strip() for cell in line.strip("|").split("|"))


def test_hours_are_those_of_the_runs():
    assert hours.page(RESULTS, figures.RESULTS) == RESULTS, "run scripts/experiments/hours.py"


#: How README and choosing.md call the rows of the table of computing.
CALLS = {
    "gradients in fp16, each step": "fp16, in each step",
    "DDP with fp16": "fp16, in each step",
    "`low_bit`": "period 3, 2 bits",
    "`low_bit(model, optimizers)`": "period 3, 2 bits",
    "`low_bit`, `period=8, bits=1, mean_bits=2`": "period 8, 1 bit, averages in 2",
    "`low_bit(..., period=8, bits=1, mean_bits=2)`": "period 8, 1 bit, averages in 2",
    "`low_bit(..., period=16, bits=1, decay=0.9)`": "period 16, 1 bit",
}


@pytest.mark.parametrize(("name", "links"), [("README.md", 3), ("docs/choosing.md", 4)])
def test_shares_are_what_was_measured(name, links):
    measured = {row["exchange"]: dict(row) for row in figures.shares(figures.RESULTS, figures.SLOWED)}
    for row in figures.shares(figures.RESULTS, figures.SLOWED_FAR):
        measured[row["exchange"]] |= row
    lines = (ROOT / name).read_text().split("5 Gbit/s |")[1].split("\n\n")[0].splitlines()[2:]
    assert len(lines) == links
    for call, _, *shares in map(cells, lines):
        for share, link in zip(shares, [*figures.SLOWED, "1 Gbit/s, 50 ms"], strict=False):
            found = measured[CALLS[call]].get(link, "-").partition("%")[0]
            assert share in ("", f"{found} %"), (call, link)
            assert share or found == "-"
