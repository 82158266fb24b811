"""README is short, its links lead somewhere, and its figures come from results that name a commit."""

import re
import subprocess
from pathlib import Path

import figures
import pytest

ROOT = Path(__file__).resolve().parents[2]

README = (ROOT / "README.md").read_text()
#: Where the figures of README and of docs/choosing.md's GPT are from.
SOURCES = ("exchange-ring", "gpt-adamw", "gpt-muon", *figures.RACES)


def words(page: str) -> int:
    """What a reader reads, code and tables included, without addresses and comments."""
    page = re.sub(r"<!--.*?-->", "", re.sub(r"\]\([^)]*\)", "]", page), flags=re.DOTALL)
    return sum(bool(re.search(r"\w", word)) for word in page.split())


def test_is_short():
    assert words("# One\n| two | [three four](address.md#x) |\n<!-- no\nmore --> `five` ─► ...") == 5
    assert words(README) <= 600


def test_links_lead_somewhere():
    targets = re.findall(r"\]\(([^)]+)\)", README)
    assert len(targets) > 10
    assert [target for target in targets if "://" not in target and not (ROOT / target.split("#")[0]).exists()] == []


def test_table_of_steps_is_current():
    assert figures.readme(README, figures.RESULTS) == README, "run scripts/experiments/figures.py"


def evidence() -> set[float]:
    """What the results say, rounded as README may print it."""
    steps, races = figures.steps(figures.RESULTS), figures.races(figures.RESULTS)
    ratios = [steps[column] / steps["IWP"] for column in figures.BASELINES.values()]
    finals = [run["test_accuracy"] for run in figures.read(figures.RESULTS, "race-vgg11").values()]
    return {
        *(round(x) for x in races.stack().dropna()),
        *(float(f"{x:.2g}") for ratio in ratios for x in ratio),
        *(round(x, 2) for x in finals),
        *(target for _, target in figures.RACES.values()),
    }


def test_does_it_help_me_says_what_was_measured():
    rows = [line.strip("| ").split(" | ") for line in README.splitlines() if line.startswith("| ")]
    measured = [row[4] for row in rows if len(row) == 5 and row[0] != "links"]
    numbers = {float(text) for cell in measured for text in re.findall(r"\d+(?:\.\d+)?", cell.replace("fp16", ""))}
    assert len(numbers) > 10
    assert numbers <= evidence(), f"not in the results: {sorted(numbers - evidence())}"


def test_gpt_of_choosing_is_what_was_measured():
    """Every point of its figure is a row of its table."""
    page = (ROOT / "docs" / "choosing.md").read_text()
    rows = re.findall(r"^\|[^|]+\| (\d+) \| (\d\.\d{3})\b", page, re.MULTILINE)
    points = [point for line in figures.text(figures.RESULTS).values() for point in line]
    missing = {(ratio, round(bits, 3)) for ratio, bits in points} - {(float(x), float(y)) for x, y in rows}
    assert points and not missing


def test_break_even_is_what_was_measured():
    (low, high), measured = re.findall(r"was (\d+) to (\d+) Gbit/s", README)[0], figures.break_even(figures.RESULTS)
    assert len(measured) == len(figures.LINKS)
    assert (int(low), int(high)) == (round(min(measured)), round(max(measured)))


def commits():
    """By experiment and run."""
    runs = {(name, run): found for name in SOURCES for run, found in figures.read(figures.RESULTS, name).items()}
    return {key: found["config"]["git_commit"] for key, found in runs.items()}


def test_results_name_a_commit():
    assert len(commits()) > 20
    for run, commit in commits().items():
        assert re.fullmatch(r"[0-9a-f]{40}(-dirty)?", commit), f"{run}: {commit}"


def test_commits_are_of_this_repository():
    if subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, check=False).returncode:
        pytest.skip("not a git checkout")
    for commit in {commit.removesuffix("-dirty") for commit in commits().values()}:
        ancestor = ["git", "merge-base", "--is-ancestor", commit, "HEAD"]
        assert subprocess.run(ancestor, cwd=ROOT, capture_output=True, check=False).returncode == 0, commit
