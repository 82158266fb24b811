"""scripts/torch_versions.py, without a download: what it would try, what it makes of failures, and its table."""

import json
import re
import subprocess
import sys

import common_cases
import ddp_cases
import fsdp_cases
import pytest
import torch_versions
from launch import ROOT
from methods import METHODS
from torch_versions import COLUMNS, END, MARK, Environment, attempt, candidates, constraints, oldest, reason, report

from hvd_compress.cli.doctor import OLDEST_TORCH

PASSED = {"name": "2.13.0", "torch": "2.13.0+cpu", "found": dict.fromkeys(COLUMNS, ""), "cuda": False}
FAILED = {
    "name": "2.14.1",
    "torch": "2.14.1+cu130",
    "found": {"wheel": "", "smoke": "", "DDP": "", "FSDP2": "iwp plain: KeyError: `a`", "nodes": "", "from source": ""},
    "cuda": True,
}
MISSING = {"name": "2.9.0", "missing": "ERROR: No matching distribution found for torch==2.9.0"}


def rows(table):
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line[:1] == "|"]


def test_candidates_are_the_newest_patches_from_the_oldest_torch_on():
    listed = "2.101.0, 2.14.1, 2.14.0, 2.14.10, 2.13.0+cpu, 2.13.0, 2.12.0rc1, 2.11.0, 2.10.5, 2.9.1"
    text = f"torch (2.14.1)\nAvailable versions: {listed}\n  INSTALLED: 2.13.0"
    assert oldest() == (2, 11)
    assert candidates(text) == ["2.101.0", "2.14.10", "2.13.0", "2.11.0"]
    assert candidates("") == []


def test_table():
    header, _, *lines = rows(report([MISSING, PASSED, FAILED]))
    assert header == ["torch", *COLUMNS] and len(header) <= 7
    assert lines == [
        ["2.14.1+cu130", "passes", "passes", "passes", "**fails**", "passes", "passes, with CUDA"],
        ["2.13.0+cpu", *["passes"] * 6],
        ["2.9.0", "not installed", *["-"] * 5],
    ]
    assert report([MISSING, PASSED, FAILED]).splitlines()[-2:] == [
        "- 2.14.1+cu130, FSDP2: `iwp plain: KeyError: 'a'`",
        "- 2.9.0, not installed: `ERROR: No matching distribution found for torch==2.9.0`",
    ]


@pytest.mark.parametrize(
    ("output", "code", "expected"),
    [
        ("fine\n", 124, "ended after 60 s"),
        ("Killed\n", 137, "ended after 60 s"),
        ("", 3, "exit status 3"),
        ("first\n  last\n\n", 1, "last"),
        ("WARNING: a\nERROR: no torch==9\nERROR: more\n", 1, "ERROR: no torch==9"),
        ("[rank1]: Traceback\n[rank1]: a.b.DistError: lost\nChildFailedError: \n", 1, "a.b.DistError: lost"),
        ("[rank 1] failed iwp plain\n  x = 1\nAssertionError\n\n", 1, "iwp plain: AssertionError"),
        ("ERROR: HTTP error 404 while getting https://a.example/b\n", 1, "ERROR: HTTP error 404 while getting ..."),
        ("ERROR: Pool(host='a.example', port=443)\n", 1, "ERROR: Pool(..., port=443)"),
        ("RuntimeError: " + "x" * 300, 1, "RuntimeError: " + "x" * 183 + "..."),
    ],
)
def test_reason(output, code, expected):
    assert reason(output, code, 60) == expected


def test_commands_see_nothing_of_the_checkout(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(Environment, "python", sys.executable)
    here = Environment(tmp_path, tmp_path / "log")
    code = "import os, sys; sys.exit(os.environ.get('PYTHONPATH') or os.getcwd() != sys.argv[1])"
    assert here.run(60, sys.executable, "-c", code, str(tmp_path)) == ""
    seen = "'PYTHONPATH' in __import__('os').environ, __import__('os').getcwd()"
    assert here.says(seen) == f"False {tmp_path}"


@pytest.fixture
def tried(monkeypatch, tmp_path):
    """Tries a version without running anything: commands that contain the given text fail. Returns the result, and the
    commands as lines."""

    def of(failing):
        commands = []

        def run(self, limit, command, variables):
            commands.append(" ".join(command))
            return "bad" if failing in commands[-1] else ""

        monkeypatch.setattr(Environment, "_run", run)
        monkeypatch.setattr(Environment, "says", lambda self, code: "2.99.0+cu1" if "__version__" in code else "True")
        return attempt("2.99.0", tmp_path / "a.whl", tmp_path / "a.tar.gz", tmp_path / "log"), commands

    return of


def test_a_version_that_passes(tried):
    result, commands = tried("nothing that is run")
    assert result == {"torch": "2.99.0+cu1", "found": dict.fromkeys(COLUMNS, ""), "cuda": True}
    assert all("torch==2.99.0" in line for line in commands if "a.whl" in line)
    (smoke,) = (number for number, line in enumerate(commands) if "wheel_smoke.py" in line)
    (tools,) = (number for number, line in enumerate(commands) if "numpy" in line)
    assert smoke < tools  # the wheel must work without NumPy
    for training in torch_versions.TRAININGS.values():
        (line,) = (line for line in commands if line.endswith(" ".join(training.command())))
        assert f"--nproc-per-node {training.ranks} " in line


@pytest.mark.parametrize(
    ("failing", "expected"),
    [
        ("a.whl", {"wheel": "bad", "from source": ""}),
        ("wheel_smoke", {**dict.fromkeys(COLUMNS, ""), "smoke": "bad"}),
        ("--host fsdp", {**dict.fromkeys(COLUMNS, ""), "FSDP2": "bad"}),
        ("a.tar.gz", {**dict.fromkeys(COLUMNS, ""), "from source": "bad"}),
        ("numpy", {"wheel": "", "smoke": "", **dict.fromkeys([*torch_versions.TRAININGS, "from source"], "bad")}),
    ],
)
def test_a_version_that_fails(tried, failing, expected):
    result, _ = tried(failing)
    assert result["found"] == expected
    assert result["cuda"] == (not expected["from source"])


def test_a_version_that_cannot_be_installed(tried, monkeypatch):
    assert tried("torch==2.99.0")[0] == {"missing": "bad"}
    monkeypatch.setattr(torch_versions, "NEEDED", 1e9)
    result, commands = tried("nothing")
    assert re.fullmatch(r"\d+ GB of disk are free in .*, 1000000000.0 are needed", result["missing"]) and not commands


def test_the_cases_exist():
    common = {**common_cases.CASES, **ddp_cases.CASES}
    for column, training in torch_versions.TRAININGS.items():
        cases = fsdp_cases.CASES if column == "FSDP2" else common
        assert set(training.plan) <= set(METHODS)
        for method, names in training.plan.items():
            assert set(names) <= set(cases), column
            assert names and all(cases[name].applies(method) for name in names)


def test_report_writes_the_page(tmp_path, monkeypatch, capsys):
    file, results = tmp_path / "page.md", tmp_path / "runs.jsonl"
    file.write_text(f"before\n{MARK}\nold\n{END}\nafter\n{END}\n")
    results.write_text("".join(json.dumps(run) + "\n" for run in (PASSED, FAILED)))
    options = ["--report", "--page", str(file), "--results", str(results)]
    monkeypatch.setattr(sys, "argv", ["torch_versions.py", *options])
    for _ in range(2):
        torch_versions.main()
        table = report([PASSED, FAILED])
        assert file.read_text() == f"before\n{MARK}\n{table}\n{END}\nafter\n{END}\n"
        assert capsys.readouterr().out == table + "\n"


def test_other_torches_are_installed_without_the_pins_that_they_refuse():
    """scripts/setup.sh with HVD_COMPRESS_TORCH leaves out the same lines: torch before 2.13 needs setuptools < 82."""
    pinned = (ROOT / "scripts" / "constraints.txt").read_text()
    (pattern,) = re.findall(
        r"^ *grep -vE '(.*)' scripts/constraints.txt", (ROOT / "scripts/setup.sh").read_text(), re.M
    )
    done = subprocess.run(["grep", "-vE", pattern], input=pinned, capture_output=True, text=True, check=True)
    kept = [line for line in done.stdout.splitlines() if not line.startswith("#")]
    assert constraints().splitlines() == kept
    left_out = {line.partition("==")[0] for line in pinned.splitlines() if "==" in line and line not in kept}
    assert left_out == {"torch", "setuptools"}


def test_install_page_is_current():
    text, runs = torch_versions.PAGE.read_text(), torch_versions.read_runs(torch_versions.RESULTS)
    assert torch_versions.page(text, runs.values()) == text, "run scripts/torch_versions.py --report"


def test_the_oldest_torch_is_the_same_everywhere_and_was_tried():
    (target,) = re.findall(r"TORCH_TARGET_VERSION=0x(\w{4})0{12}", (ROOT / "setup.py").read_text())
    assert (int(target[:2], 16), int(target[2:], 16)) == oldest() == OLDEST_TORCH
    claim = re.compile(r"torch ?>= ?(\d+\.\d+)|torch (\d+\.\d+) (?:or|and) later|torches from (\d+\.\d+) on")
    files = ["pyproject.toml", "README.md", "docs/install.md", "CONTRIBUTING.md", "setup.py"]
    for file in [*files, "scripts/constraints.txt"]:
        found = {"".join(groups) for groups in claim.findall((ROOT / file).read_text())}
        assert {torch_versions.key(version) for version in found} == {oldest()}, file
    runs = torch_versions.read_runs(torch_versions.RESULTS).values()
    passed = [run["name"] for run in runs if "found" in run and not any(run["found"].values())]
    assert min(map(torch_versions.key, passed))[:2] == oldest()
