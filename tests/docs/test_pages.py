"""What pages print can be run, and tables of stored runs are of these runs."""

import ast
import re
import shlex
import sys
from pathlib import Path

import pytest
import table
from experiment.result_file import read_runs
from launch import end, finish, start

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "examples" / "README.md", *sorted(DOCS.rglob("*.md"))]
EXAMPLE = "torchft_local_steps"
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


def anchors(text: str) -> set[str]:
    """Those that GitHub gives to the headings of a page."""
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    heads = [re.sub(r"\[([^]]*)\]\([^)]*\)|`", r"\1", head) for head in re.findall(r"^#+ (.+)$", text, re.MULTILINE)]
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def lost(page: Path) -> list[str]:
    """Links of a page to files of the checkout that are not there, or to headings that their files do not have."""
    text = re.sub(r"```.*?```|`[^`\n]+`", "", page.read_text(), flags=re.DOTALL)
    found = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        if not there.exists() or (anchor and there.suffix == ".md" and anchor not in anchors(there.read_text())):
            found.append(target)
    return found


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    assert lost(page) == []


def test_lost_links_are_found(tmp_path):
    (tmp_path / "a.md").write_text("# Here, `it` is\n[a](#here-it-is) [b](b.md#gone) [c](c.md) [d](b.md) `[e](f.md)`\n")
    (tmp_path / "b.md").write_text("# There\n")
    assert lost(tmp_path / "a.md") == ["b.md#gone", "c.md"]


NAMED = re.compile(r"docs/[\w/-]+\.md")
FILES = [
    file
    for folder, kinds in {
        "hvd_compress": ("py",),
        "scripts": ("py", "sh"),
        "tests": ("py",),
        "examples": ("py",),
        "csrc": ("h", "cpp", "cu"),
        "docs": ("py",),
    }.items()
    for kind in kinds
    for file in sorted((ROOT / folder).rglob(f"*.{kind}"))
]


def test_pages_that_code_names_are_there():
    """In messages, docstrings and comments."""
    named = {(file, page) for file in FILES for page in NAMED.findall(file.read_text())}
    assert len(named) > 20
    assert {(file.name, page) for file, page in named if not (ROOT / page).exists()} == set()


TABLES = [path for path in DOCS.rglob("table.md") if re.match(r"# \S+\n\n\| method ", path.read_text())]


@pytest.mark.parametrize("path", TABLES, ids=lambda path: str(path.parent.relative_to(DOCS)))
def test_table_is_of_the_stored_runs(path):
    runs = list(read_runs(path.with_name("runs.jsonl")).values())
    assert path.read_text().partition("\n\n")[2].strip() == table.table(runs).strip()


def test_programs_of_torchft_run_as_they_stand(tmp_path):
    """That of the page on two peers, for fewer rounds; then the example by its command, which is started again."""
    coordination = pytest.importorskip("torchft.coordination", reason="torchft is not installed")
    program = re.search(r"```python\n(.*?)```", (DOCS / "torchft.md").read_text(), re.DOTALL)[1]
    assert "manager.current_step() < 20:" in program
    (tmp_path / "train.py").write_text(program.replace("< 20:", "< 3:"))
    command = ast.get_docstring(ast.parse((ROOT / "examples" / f"{EXAMPLE}.py").read_text())).split("\n\n")[1]
    variable, *printed = shlex.split(command.replace("\\\n", " "))
    assert variable.startswith("TORCHFT_LIGHTHOUSE=") and printed[:3] == ["torchrun", "--nproc-per-node", "1"]
    example = [str(ROOT / f"examples/{EXAMPLE}.py"), "--checkpoints", str(tmp_path / "states"), "--steps"]
    assert (printed[5:6], printed[8:9]) == ([f"examples/{EXAMPLE}.py"], ["--checkpoints"])
    lighthouse = coordination.LighthouseServer(bind="[::]:0", min_replicas=2, join_timeout_ms=10000)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    variables = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TORCHFT_LIGHTHOUSE": lighthouse.address()}
    rounds = []
    try:
        for script in ([str(tmp_path / "train.py")], [*example, "90"], [*example, "150"]):
            peers = [start([*launcher, *script], **variables) for _ in range(2)]
            try:
                outputs = [finish(peer, 120) for peer in peers]
            finally:
                for peer in peers:
                    end(peer)
            for peer, output in zip(peers, outputs, strict=True):
                assert peer.returncode == 0 and "times fewer bytes" in output, output
            rounds.append(re.findall(r"rounds (\d+) to (\d+) with 2 peers", "".join(outputs)))
    finally:
        lighthouse.shutdown()
    assert rounds == [[], [("1", "3")] * 2, [("4", "5")] * 2]
