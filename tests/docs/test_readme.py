"""README and the pages are short, their code runs, and their figures come from results that name a commit."""

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


def test_is_short():
    """By ``wc -w``, code and tables included."""
    assert len(README.split()) <= 600


def test_documentation_is_short():
    """Fifteen pages; raw results are files that they link. What has neither letter nor digit, such as the rules of a
    table, is no word."""
    assert len(DOCS) <= 15
    assert sum(bool(re.search(r"\w", word)) for page in DOCS.values() for word in page.split()) <= 17_500


def test_pages_are_in_the_navigation():
    listed = re.search(r"```{toctree}\n(?::.*\n)*\n(.*?)```", DOCS["index"], re.DOTALL)[1].split()
    assert sorted([*listed, "index"]) == sorted(DOCS)


def test_costs_have_ranks_and_sizes():
    """A loss without the model and the ranks it was measured with says nothing."""
    head, *table = rows("What does it cost?")
    columns = dict(zip(head, zip(*table, strict=True), strict=True))
    assert len(table) >= 4 and {"ranks", "model"} <= columns.keys()
    assert all(re.search(r"\d", ranks) for ranks in columns["ranks"])
    assert all(re.search(r"\d.* M parameters|resnet20|the same", model) for model in columns["model"])


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


def test_table_of_steps_is_current():
    page = DOCS["benchmarks"]
    assert figures.benchmarks(page, figures.RESULTS) == page, "run scripts/experiments/figures.py"


def rows(section: str) -> list[list[str]]:
    """The cells of README's table in a section, its head first."""
    text = README.split(f"## {section}\n")[1].split("\n## ")[0]
    lines = [line for line in text.splitlines() if line[:1] == "|"]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in [lines[0], *lines[2:]]]


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
    for page in ("local_steps", "gradients", "nodes", "horovod")
    for number, block in enumerate(blocks(DOCS[page]))
    if "init_process_group" in block or "hvd.init()" in block
}


def with_hooks() -> str:
    """The program of docs/nodes.md, with what its page says in the place of optimizers and local steps."""
    program, hooks, *_ = blocks(DOCS["nodes"])
    head, _, rest = program.partition("matrices, others")
    loop = rest.partition("\n\n")[2]
    for old, new in (
        (
            "    muon.step()\n    adamw.step()\n    local.step()  # every third call exchanges\n",
            "    optimizer.step()\n",
        ),
        ("local.finish(model)  # averages all weights: before testing\n", ""),
        ("local.compression", "compression"),
    ):
        assert old in loop
        loop = loop.replace(old, new)
    return f"{head}{hooks}\n{loop}"


def between_nodes() -> str:
    """The program of docs/local_steps.md on two nodes of one rank, as docs/nodes.md says."""
    program = blocks(DOCS["local_steps"])[0]
    (nodes,) = [block for block in blocks(DOCS["nodes"]) if "nodes=mesh" in block]
    line = "local = hvd_compress.recipes.low_bit(model, [muon, adamw])\n"
    assert line in program and 'init_device_mesh("cuda", (4, 8)' in nodes
    return program.replace(line, nodes.replace('"cuda", (4, 8)', '"cpu", (2, 1)')).replace(
        "local.finish(model)", "local.finish(model.module)"
    )


def horovods_nodes() -> str:
    """The program of docs/horovod.md on two nodes of two, with the process sets of docs/nodes.md."""
    program = blocks(DOCS["horovod"])[0]
    (sets,) = [block for block in blocks(DOCS["nodes"]) if "hvd.ProcessSet" in block]
    for old, new in (("8 * node, 8 * node + 8", "2 * node, 2 * node + 2"), ("range(4)", "range(2)")):
        assert old in sets
        sets = sets.replace(old, new)
    compressor = "IWP(model.named_parameters())"
    assert compressor in program and "hvd.init()\n" in program
    return program.replace("hvd.init()\n", sets).replace(compressor, "IWP(model.named_parameters(), nodes=2)")


BLOCKS |= {"nodes, hooks": with_hooks(), "nodes, DDP inside": between_nodes(), "nodes, Horovod": horovods_nodes()}
#: Two nodes of one rank: torchrun started them on one machine.
ONE_MACHINE = 'nodes = ranks // int(os.environ["LOCAL_WORLD_SIZE"])'
#: One process group for all scripts: a second one would find the first one's addresses in torchrun's store.
DRIVER = """
import os, runpy, sys, torch, warnings
if "--horovod" in sys.argv:
    import horovod.torch as hvd
warnings.filterwarnings("error", module="<run_path>")  # the package's point at the user's line
if "--torch" in sys.argv:
    torch.distributed.init_process_group("gloo")
    torch.distributed.init_process_group = torch.distributed.destroy_process_group = lambda *_: None
for script in sys.argv[2:]:
    runpy.run_path(script)
    os.write(1, f"ran {script}\\n".encode())
    if "--horovod" in sys.argv:
        hvd.shutdown()  # hvd.init() of the next script gives other process sets
"""


@pytest.mark.parametrize("host", ["torch", "horovod"])
def test_blocks_run_as_they_stand(host, tmp_path):
    """On two ranks, with Horovod on four."""
    found = {name: block for name, block in BLOCKS.items() if ("horovod.torch" in block) == (host == "horovod")}
    assert len(found) == {"torch": 7, "horovod": 3}[host]
    for number, block in enumerate(found.values()):
        assert ONE_MACHINE in block or "nodes =" not in block
        (tmp_path / f"{number}.py").write_text(block.replace(ONE_MACHINE, "nodes = 2") + TRAINED)
    (tmp_path / "driver.py").write_text(DRIVER)
    scripts = [str(tmp_path / f"{number}.py") for number in range(len(found))]
    ranks = {"torch": 2, "horovod": 4}[host]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    if host == "horovod":
        pytest.importorskip("horovod.torch", reason="Horovod is not installed")
        command = [str(Path(sys.executable).with_name("horovodrun")), "--gloo", "-np", str(ranks), sys.executable]
    local = {"PET_RDZV_BACKEND": "c10d", "PET_RDZV_ENDPOINT": "127.0.0.1:0", "PET_LOCAL_ADDR": "127.0.0.1"}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {"PYTHONPATH": str(ROOT), "PATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    process = start(
        [*command, str(tmp_path / "driver.py"), f"--{host}", *scripts], **environment, **local, GLOO_SOCKET_IFNAME="lo"
    )
    output = finish(process, 300)
    assert process.returncode == 0, output
    assert {output.count(f"ran {script}") for script in scripts} == {ranks}, output


#: What fragments take as the user's: those of the blocks before them on their pages, by page.
GIVEN = """
import os, torch, hvd_compress
from types import SimpleNamespace
wandb = SimpleNamespace(log=lambda metrics, step: None)
rank, old_ranks, step = 0, 1, 0
learning_rate, weight_decay, beta1, beta2 = 3e-3, 0.1, 0.9, 0.95
torch.manual_seed(0)
model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(5)])
inputs = torch.randn(32, 64)
batches = [(inputs, inputs[:, :4].argmax(1))] * 7
loss_function = torch.nn.functional.cross_entropy
matrices, others = hvd_compress.hidden_matrices(model)
muon = torch.optim.Muon(matrices.values(), lr=3e-3, adjust_lr_fn="match_rms_adamw")
adamw = torch.optim.AdamW(others.values(), lr=3e-3)
local = hvd_compress.LocalSteps(hvd_compress.Quantized(model), [muon, adamw], 3) if LOCAL else None
compression = None if LOCAL else hvd_compress.IWP(model)
"""
#: Blocks that are no whole programs: page, what the block contains, and whether local steps are given.
FRAGMENTS = [
    ("local_steps", "CombinedOptimizer", False),
    ("local_steps", "period=8", False),
    ("local_steps", "on_averaged_gradients", False),
    ("local_steps", "delay=2", False),
    ("local_steps", "fragments=3", False),
    ("checkpoints", 'f"compression-{rank}.pt")  #', False),
    ("checkpoints", "parts =", True),
    ("checkpoints", "reshard", False),
    ("check", "wandb", False),
    ("extending", "class Largest", False),
    ("nodes", "DCPState", True),
]
#: Run as programs above, or by test_pages.py (torchft). Those of trainers and torchtitan are compiled only, which
#: tests/trainers does; a torchft peer with FSDP2 is trained in tests/peers.
ELSEWHERE = {
    "local_steps": 1, "gradients": 2, "nodes": 5, "horovod": 2, "trainers": 5, "torchft": 2, "checkpoints": 0,
    "check": 0, "extending": 0, "choosing": 0, "index": 0, "install": 0, "methods": 0, "results": 0, "benchmarks": 0,
}  # fmt: skip


def test_every_block_is_run_by_a_test():
    for page, text in DOCS.items():
        fragments = sum(page == of for of, *_ in FRAGMENTS)
        assert len(blocks(text)) == fragments + ELSEWHERE[page], page


#: The process group is made once; every fragment has a model and optimizers of its own.
ONE_BY_ONE = """
import sys, torch
torch.distributed.init_process_group("gloo")
for script in sys.argv[1:]:
    exec(compile(open(script).read(), script, "exec"), {"__name__": "fragment"})
    print("ran", script, flush=True)
"""


def test_fragments_run_as_they_stand(tmp_path):
    """With one process, after what their pages have given before."""
    scripts = []
    for number, (page, part, local) in enumerate(FRAGMENTS):
        (block,) = [block for block in blocks(DOCS[page]) if part in block]
        if "fragments=3" in block:  # of a small model
            assert "bucket_mb=2" in block
            block = block.replace("bucket_mb=2", "bucket_mb=0.02")
        saved = 'torch.save(compression.state_dict(), f"compression-{rank}.pt")\n' if "reshard" in block else ""
        scripts.append(tmp_path / f"{number}.py")
        scripts[-1].write_text(f"LOCAL = {local}\n{GIVEN}{saved}{block}")
    (tmp_path / "driver.py").write_text(ONE_BY_ONE)
    one = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "PYTHONPATH": str(ROOT)}
    process = start(["env", "-C", str(tmp_path), sys.executable, "driver.py", *map(str, scripts)], **one)
    output = finish(process, 170)
    assert process.returncode == 0 and output.count("ran ") == len(scripts), output


def test_break_even_is_what_was_measured():
    low, high = re.findall(r"was (\d+) to (\d+) Gbit/s", " ".join(DOCS["benchmarks"].split()))[0]
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
