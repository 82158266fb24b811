"""README is short, its links lead somewhere, its code runs, and its figures come from results that name a commit."""

import os
import re
import subprocess
import sys
from pathlib import Path

import figures
import pytest
from launch import finish, start

ROOT = Path(__file__).resolve().parents[2]

README = (ROOT / "README.md").read_text()
DOCS = {path.stem: path.read_text() for path in (ROOT / "docs").glob("*.md")}
#: Where the figures of README and of docs/results.md's GPT are from.
SOURCES = ("exchange-ring", "exchange-pause", "exchange-hsdp", "gpt-adamw", "gpt-muon", "gpt-long", *figures.RACES)


def words(page: str) -> int:
    """What a reader reads, code and tables included, without addresses and comments."""
    page = re.sub(r"<!--.*?-->", "", re.sub(r"\]\([^)]*\)", "]", page), flags=re.DOTALL)
    return sum(bool(re.search(r"\w", word)) for word in page.split())


def test_is_short():
    assert words("# One\n| two | [three four](address.md#x) |\n<!-- no\nmore --> `five` ─► ...") == 5
    assert words(README) <= 800


#: Lines that a reader sees without scrolling.
SCREEN = 35


@pytest.mark.parametrize("name", ["train.sh", "test.sh"])
def test_first_screen_names_what_a_clone_runs(name):
    """As a line that can be copied; CONTRIBUTING names the same."""
    command = f"bash scripts/{name}"
    for page, first in (("README.md", SCREEN), ("CONTRIBUTING.md", None)):
        lines = (ROOT / page).read_text().splitlines()[:first]
        assert any(re.match(rf"    {command}( |$)", line) for line in lines), f"{page} must name `{command}`"
    assert "bash scripts/setup.sh" in (ROOT / "scripts" / name).read_text(), "it must run in a fresh clone"


def test_ci_runs_the_tests_that_readme_names(tmp_path):
    """``.ci/run`` beside another ``scripts/test.sh``, from another folder."""
    for folder, name, content in (
        (".ci", "run", (ROOT / ".ci" / "run").read_text()),
        ("scripts", "test.sh", "exit 42"),
    ):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).write_text(content)
    assert subprocess.run(["bash", str(tmp_path / ".ci" / "run")], cwd="/", check=False).returncode == 42


def test_links_lead_somewhere():
    targets = re.findall(r"\]\(([^)]+)\)", README)
    assert len(targets) > 10
    assert [target for target in targets if "://" not in target and not (ROOT / target.split("#")[0]).exists()] == []


def test_table_of_steps_is_current():
    page = DOCS["benchmarks"]
    assert figures.benchmarks(page, figures.RESULTS) == page, "run scripts/experiments/figures.py"


def mean(experiment: str, name: str, metric: str) -> tuple[float, set[str]]:
    """Over the seeds of a run, whose names end in their number; and the commits that ran."""
    found = figures.read(figures.RESULTS, experiment)
    runs = [run for key, run in found.items() if key in (name, f"{name}-0", f"{name}-1", f"{name}-2")]
    return sum(run[metric] for run in runs) / len(runs), {run["config"]["git_commit"] for run in runs}


def step(experiment: str, rate: str, method: str) -> tuple[float, set[str]]:
    """Milliseconds."""
    runs = figures.read(figures.RESULTS, experiment).values()
    (found,) = [(row["step_ms"], {run["config"]["git_commit"]}) for run in runs for row in run["rows"]
                if (row["rate"], row["method"]) == (rate, method)]  # fmt: skip
    return found


def race(method: str) -> tuple[float, set[str]]:
    """Seconds of vgg11 at 100 Mbit/s."""
    seconds = figures.races(figures.RESULTS).loc["vgg11 to 0.6\n100 Mbit/s", method]
    runs = figures.read(figures.RESULTS, "race-vgg11")
    return seconds, {runs[f"100mbit-{method.lower()}-mpi"]["config"]["git_commit"]}


def records() -> list[tuple[tuple[float, set[str]], tuple[float, set[str]]]]:
    """What README's table of records says, in its order: here, and without."""
    bits, accuracy = "test_bits_per_byte", "test_accuracy"
    dense = mean("gpt-muon", "none@muon-3e-3", bits)
    # The first seed of dense training is in another experiment.
    others, last = mean("cifar10-signs/10", "none-0.3", accuracy), mean("cifar10", "none", accuracy)
    return [
        (mean("gpt-muon", "quantized@45-6e-3", bits), dense),
        (mean("gpt-long", "quantized@45-4.5e-3", bits), mean("gpt-long", "none@muon-3e-3", bits)),
        (mean("gpt-muon", "quantized@170-4.5e-3", bits), dense),
        (mean("cifar10-signs/10", "demo@orthogonal-1of64-6e-3", accuracy), ((2 * others[0] + last[0]) / 3, others[1])),
        (step("exchange-pause", "1gbit", "ddp-quantized@few"), step("exchange-pause", "1gbit", "fp16")),
        (step("exchange-pause", "100mbit", "ddp-quantized@few"), step("exchange-pause", "100mbit", "fp16")),
        (step("exchange-hsdp", "100mbit", "iwp"), step("exchange-hsdp", "100mbit", "native-bf16")),
        (step("exchange-ring", "100mbit", "iwp"), step("exchange-ring", "100mbit", "fp16")),
        (race("FFT"), race("fp16")),
    ]


def rows(section: str) -> list[list[str]]:
    """The cells of README's table in a section, without its head."""
    text = README.split(f"## {section}\n")[1].split("\n## ")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"][2:]


def rounded(value: float, printed: str) -> str:
    """As README prints it."""
    return f"{value:,.{len(printed.partition('.')[2])}f}"


def test_records_are_what_was_measured():
    table = rows("Records")
    assert len(table) == len(records())
    for (_, what, *printed, link), measured in zip(table, records(), strict=True):
        assert [rounded(value, text) for (value, _), text in zip(measured, printed, strict=True)] == printed, what
        page, experiment = re.search(r"docs/(\w+)\.md", link)[1], re.search(r"`(.+)`", link)[1]
        assert all(text in DOCS[page] for text in printed) and experiment in DOCS[page], what


def test_records_have_the_date_of_the_code():
    if in_no_repository():
        pytest.skip("not a git checkout")
    for (date, what, *_), ((_, commits), _) in zip(rows("Records"), records(), strict=True):
        dates = [git("log", "-1", "--format=%as", commit.removesuffix("-dirty")) for commit in commits]
        assert date == max(dates), what


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def in_no_repository() -> bool:
    return bool(subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, check=False).returncode)


def test_gpt_of_results_is_what_was_measured():
    """Every point of its figure is in its tables."""
    page = DOCS["results"]
    printed = {(float(x), float(y)) for x, y in re.findall(r"^\|[^|]+\| (\d+) \| (\d\.\d{3})\b", page, re.MULTILINE)}
    for cells in re.findall(r"^\| (?:FFT|IWP) \| (\d\.\d+) \| (\d\.\d+) \| (\d\.\d+) \|$", page, re.MULTILINE):
        printed |= {(ratio, float(cell)) for ratio, cell in zip((8.0, 16.0, 64.0), cells, strict=True)}
    points = [point for line in figures.text(figures.RESULTS).values() for point in line]
    missing = {(ratio, round(bits, 3)) for ratio, bits in points} - printed
    assert points and not missing


def test_first_advice_says_what_was_measured():
    text = " ".join(README.split("## Try it")[0].split())
    ratio = re.search(r"sends\*\* (\d+) times fewer", text)[1]
    percent, bits, muon, adamw, more = re.search(
        r"costs\*\* (\S+) % .* learning rate: (\S+), dense Muon (\S+), dense AdamW (\S+); (\S+) % on 16 ranks", text
    ).groups()
    page = DOCS["results"]
    assert f"| {ratio} | {bits} (3 seeds) | {percent} % |" in page and f"{more} % over dense Muon" in page
    assert f"| Muon, dense | 1 | {muon} (3 seeds)" in page and f"| AdamW, dense | 1 | {adamw} (3 seeds)" in page
    assert f"{100 * (float(bits) / float(muon) - 1):.1f}" == percent
    times = re.search(r"(\S+) times as fast as with fp16 at 100 Mbit/s, (\S+) at 1 .* (\S+) at 10 ", text).groups()
    for rate, found in zip(("100mbit", "1gbit", "10gbit"), times, strict=True):
        few, half = (step("exchange-pause", rate, method)[0] for method in ("ddp-quantized@few", "fp16"))
        assert f"{half / few:.1f}" == found


def blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page, re.DOTALL)


#: After a block: its model has learnt its task, of which a model that has learnt nothing has a loss of log(10) = 2.3.
TRAINED = """
torch.manual_seed(10**6)
inputs = torch.randn(256, 64)
loss = torch.nn.functional.cross_entropy(model(inputs), inputs[:, :10].argmax(1)).item()
assert loss < 1.9, loss
ratio = (globals().get("compression") or local.compression).stats()["total"]["wire_ratio"]
assert ratio > 8, ratio
"""
BLOCKS = {f"README.md, {number}": block for number, block in enumerate(blocks(README))} | {
    f"{page}, {number}": block
    for page in ("quickstart_ddp", "quickstart_fsdp", "quickstart_horovod")
    for number, block in enumerate(blocks(DOCS[page]))
    if "init" in block
}
#: Two nodes of one rank: torchrun started them on one machine.
ONE_MACHINE = 'nodes = ranks // int(os.environ["LOCAL_WORLD_SIZE"])'
#: One process group for all scripts: a second one would find the first one's addresses in torchrun's store.
DRIVER = """
import os, runpy, sys, torch, warnings
warnings.filterwarnings("error", module="<run_path>")  # the package's point at the user's line
if "--torch" in sys.argv:
    torch.distributed.init_process_group("gloo")
    torch.distributed.init_process_group = torch.distributed.destroy_process_group = lambda *_: None
for script in sys.argv[2:]:
    runpy.run_path(script)
    os.write(1, f"ran {script}\\n".encode())
"""


@pytest.mark.parametrize("host", ["torch", "horovod"])
def test_blocks_run_as_they_stand(host, tmp_path):
    """On two ranks."""
    found = {name: block for name, block in BLOCKS.items() if ("horovod.torch" in block) == (host == "horovod")}
    assert len(found) == {"torch": 6, "horovod": 2}[host]
    for number, block in enumerate(found.values()):
        assert ONE_MACHINE in block or "nodes =" not in block
        (tmp_path / f"{number}.py").write_text(block.replace(ONE_MACHINE, "nodes = 2") + TRAINED)
    (tmp_path / "driver.py").write_text(DRIVER)
    scripts = [str(tmp_path / f"{number}.py") for number in range(len(found))]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    if host == "horovod":
        pytest.importorskip("horovod.torch", reason="Horovod is not installed")
        command = [str(Path(sys.executable).with_name("horovodrun")), "--gloo", "-np", "2", sys.executable]
    local = {"PET_RDZV_BACKEND": "c10d", "PET_RDZV_ENDPOINT": "127.0.0.1:0", "PET_LOCAL_ADDR": "127.0.0.1"}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {"PYTHONPATH": str(ROOT), "PATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    process = start(
        [*command, str(tmp_path / "driver.py"), f"--{host}", *scripts], **environment, **local, GLOO_SOCKET_IFNAME="lo"
    )
    output = finish(process, 300)
    assert process.returncode == 0, output
    assert [output.count(f"ran {script}") for script in scripts] == [2] * len(scripts), output


#: What the first block of docs/local_steps.md takes as the user's.
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


def test_block_of_local_steps_runs_as_it_stands(tmp_path):
    """With one process."""
    script = tmp_path / "use.py"
    after = "assert loss_function(model(inputs), targets).item() < before\n"
    script.write_text(BEFORE + blocks(DOCS["local_steps"])[0] + after)
    one = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "PYTHONPATH": str(ROOT)}
    process = start([sys.executable, str(script)], **one)
    output = finish(process, 170)
    assert process.returncode == 0, output


def test_break_even_is_what_was_measured():
    low, high = re.findall(r"was (\d+) to (\d+) Gbit/s", DOCS["benchmarks"])[0]
    measured = figures.break_even(figures.RESULTS)
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
    if in_no_repository():
        pytest.skip("not a git checkout")
    for commit in {commit.removesuffix("-dirty") for commit in commits().values()}:
        ancestor = ["git", "merge-base", "--is-ancestor", commit, "HEAD"]
        assert subprocess.run(ancestor, cwd=ROOT, capture_output=True, check=False).returncode == 0, commit
