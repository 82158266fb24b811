"""What pages print can be run, and tables of stored runs are of these runs."""

import re
import sys
from pathlib import Path

import pytest
import table
from experiment.result_file import read_runs
from launch import end, finish, start

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "examples" / "README.md", *sorted(DOCS.rglob("*.md"))]
SCRIPT = re.compile(r"(?:scripts|examples)/[\w/-]+\.(?:py|sh)\b")


def refused(page: str) -> list[str]:
    """Scripts of the checkout that a command of the page starts by their name, and that are not executable."""
    indented = re.findall(r"^ {4}(\S+)", page, re.MULTILINE)
    fenced = [line.split()[0] for block in re.findall(r"```(?:sh|bash)?\n(.*?)```", page, re.DOTALL)
              for line in block.splitlines() if line.strip()]  # fmt: skip
    spans = [span.split()[0] for span in re.findall(r"`([^`\n]+ [^`\n]+)`", page) if span.split()]
    started = [first for first in [*indented, *fenced, *spans] if SCRIPT.fullmatch(first)]
    return [script for script in started if not (ROOT / script).stat().st_mode & 0o100]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_may_be_executed(page):
    assert refused(page.read_text()) == []


@pytest.mark.parametrize(
    "command",
    [
        "    scripts/lab/scaling.py --json x",
        "```\nscripts/lab/bench_ops.py\n```",
        "so (`scripts/torch_versions.py -h`)",
    ],
)
def test_commands_that_are_refused_are_found(command):
    assert len(refused(command)) == 1
    assert not refused(command.replace("scripts/", ".venv/bin/python scripts/"))


TABLES = [path for path in DOCS.rglob("table.md") if re.match(r"# \S+\n\n\| method ", path.read_text())]


@pytest.mark.parametrize("path", TABLES, ids=lambda path: str(path.parent.relative_to(DOCS)))
def test_table_is_of_the_stored_runs(path):
    runs = list(read_runs(path.with_name("runs.jsonl")).values())
    assert path.read_text().partition("\n\n")[2].strip() == table.table(runs).strip()


def test_program_of_torchft_runs_as_it_stands(tmp_path):
    """On two peers, for fewer rounds."""
    coordination = pytest.importorskip("torchft.coordination", reason="torchft is not installed")
    program = re.search(r"```python\n(.*?)```", (DOCS / "torchft.md").read_text(), re.DOTALL)[1]
    assert "manager.current_step() < 20:" in program
    (tmp_path / "train.py").write_text(program.replace("< 20:", "< 3:"))
    lighthouse = coordination.LighthouseServer(bind="[::]:0", min_replicas=2, join_timeout_ms=10000)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", str(tmp_path / "train.py")]
    variables = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TORCHFT_LIGHTHOUSE": lighthouse.address()}
    peers = [start(launcher, **variables) for _ in range(2)]
    try:
        for peer in peers:
            output = finish(peer, 120)
            assert peer.returncode == 0 and "times fewer bytes than dense" in output, output
    finally:
        for peer in peers:
            end(peer)
        lighthouse.shutdown()
