"""README is short, its links lead somewhere, its code runs, and its figures come from results that name a commit."""

import re
import subprocess
import sys
from pathlib import Path

import figures
import pytest
from launch import finish, start

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
    assert words(README) <= 660


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


def test_does_it_help_me_says_what_a_gpt_has_shown():
    text = " ".join(README.split("## Does it help me?")[1].split("## Use")[0].split())
    bits, ratio, percent, muon, adamw = re.search(
        r"to (\S+) bits per byte in (\d+) times fewer bytes, (\S+) % above dense Muon's (\S+); dense AdamW (\S+) ", text
    ).groups()
    rows = (ROOT / "docs" / "choosing.md").read_text()
    assert f"| {ratio} | {bits} (3 seeds) | -9.0 % | {percent} % |" in rows
    assert f"| Muon, dense | 1 | {muon} (3 seeds)" in rows and f"| AdamW, dense | 1 | {adamw} (3 seeds)" in rows
    assert f"{100 * (float(bits) / float(muon) - 1):.1f}" == percent
    slow, fast = re.search(r"(\S+) times as fast as with fp16 at 1 Gbit/s, (\S+) times at 100 Mbit/s", text).groups()
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    assert re.search(rf"^\| 1 Gbit/s, 100 ms .*\| {slow} \|$", page, re.MULTILINE)
    assert re.search(rf"^\| 100 Mbit/s, 350 ms .*\| {fast} \|$", page, re.MULTILINE)


#: What the blocks of "Use" take as the user's, and a step by what a block has built.
BEFORE = """
import torch
import hvd_compress
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64), torch.nn.Linear(64, 4))
inputs = torch.randn(32, 16)
batches = [(inputs, inputs[:, :4].argmax(1))] * 7
loss_function = torch.nn.functional.cross_entropy
before = loss_function(model(inputs), batches[0][1]).item()
"""
AFTER = """
if "local" not in globals():
    for inputs, targets in batches:
        optimizer.zero_grad()
        loss_function(globals().get("ddp", model)(inputs), targets).backward()
        optimizer.step()
assert loss_function(model(inputs), targets).item() < before
"""


def blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page, re.DOTALL)


BLOCKS = blocks(README.split("## Use")[1].split("## Measured")[0])
PAGE = blocks((ROOT / "docs" / "local_steps.md").read_text())[0]
INIT = '\ntorch.distributed.init_process_group("gloo")\n'


@pytest.mark.parametrize("block", [*BLOCKS, PAGE], ids=["local steps", "DeMo", "Horovod", "docs/local_steps.md"])
def test_blocks_of_use_run_as_they_stand(block, tmp_path):
    """With one process: what a block builds trains."""
    if "horovod" in block:
        pytest.importorskip("horovod.torch", reason="Horovod is not installed")
    group = INIT if "init" not in block else ""  # README's second block follows the first
    script = tmp_path / "use.py"
    script.write_text(BEFORE + group + block + AFTER)
    one = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "PYTHONPATH": str(ROOT)}
    process = start([sys.executable, str(script)], **one)
    output = finish(process, 170)
    assert process.returncode == 0, output


def test_break_even_is_what_was_measured():
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    (low, high), measured = re.findall(r"was (\d+) to (\d+) Gbit/s", page)[0], figures.break_even(figures.RESULTS)
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
