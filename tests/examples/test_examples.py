"""Each example runs on 2 ranks, by the command in its docstring. After half of the steps it resumes from its
checkpoint, with the result of one run."""

import ast
import os
import re
import shlex
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from launch import ROOT, finish, start

EXAMPLES = ROOT / "examples"
DRIVER = str(Path(__file__).with_name("resume.py"))
#: Examples, and the package that each needs.
PACKAGE = {
    "ddp_sgd": "torch",
    "gpt_demo": "torch",
    "custom_method": "torch",
    "lightning_callback": "lightning",
    "accelerate_loop": "accelerate",
    "transformers_trainer": "transformers",
    "horovod_sgd": "horovod",
}
ELASTIC = "horovod_elastic"
#: Seconds of a launch, on a machine that is busy otherwise.
LIMIT = 240.0
LINE = r"rank (\d): (\d+) steps(?: from (\d+))?, loss (\d+\.\d+), (\d+\.\d) times fewer bytes"


def results(output, runs):
    """(steps, first step or "", loss, ratio) of each run, equal on both ranks but for the ratio."""
    found = re.findall(LINE, output)
    of_ranks = [[line[1:] for line in found if line[0] == rank] for rank in "01"]
    assert all(len(lines) == runs for lines in of_ranks), output[-3000:]
    assert [line[:3] for line in of_ranks[0]] == [line[:3] for line in of_ranks[1]], "replicas differ"
    return of_ranks[0]


def check_resumed(output, steps):
    whole, half, resumed, again = results(output, 4)
    assert [int(run[0]) for run in (whole, half, resumed)] == [steps, steps // 2, steps]
    assert resumed[1] in ("", str(steps // 2)) and again[1] in ("", str(steps))
    assert resumed[2] == whole[2], f"training differs after resuming: {output}"
    if int(again[0]) == steps:  # transformers' Trainer takes one more step
        assert again[2:] == resumed[2:], f"a run without a step left differs: {output}"
    assert float(whole[2]) < float(half[2]), "nothing was learnt"
    assert float(whole[3]) > 8


def printed(name):
    """The words of the command in an example's docstring, up to the script: the second paragraph."""
    command = ast.get_docstring(ast.parse((EXAMPLES / f"{name}.py").read_text())).split("\n\n")[1]
    *launcher, script, steps, count, checkpoints, _ = shlex.split(command.replace("\\\n", " "))
    assert (script, steps, checkpoints) == (f"examples/{name}.py", "--steps", "--checkpoints") and int(count) > 0
    return launcher


def run(launcher, *arguments):
    """What the ranks printed. The launcher and their interpreter are those of the tests' environment; torchrun takes
    the options that keep it on this machine, as in scripts/run.sh, from variables."""
    local = {"PET_RDZV_BACKEND": "c10d", "PET_RDZV_ENDPOINT": "127.0.0.1:0"}
    local |= {"PET_MASTER_ADDR": "127.0.0.1", "PET_LOCAL_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {"PATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONUNBUFFERED": "1"}
    return finish(start([*launcher, *arguments], **environment, **local), LIMIT)


def test_every_example_is_tested_short_and_in_the_index():
    files = {path.stem: path.read_text() for path in EXAMPLES.glob("*.py")}
    assert files.keys() == {*PACKAGE, ELASTIC}
    assert {name for name, text in files.items() if len(text.splitlines()) >= 80} == set()
    assert set(re.findall(r"\((\w+)\.py\)", (EXAMPLES / "README.md").read_text())) == files.keys()


@pytest.mark.parametrize("name", PACKAGE)
def test_example(name, tmp_path):
    if find_spec(PACKAGE[name]) is None:
        pytest.skip(f"{PACKAGE[name]} is not installed")
    steps = 20
    check_resumed(run(printed(name), DRIVER, str(EXAMPLES / f"{name}.py"), str(tmp_path), str(steps)), steps)


def test_elastic_example(tmp_path):
    """Two jobs: the second one resumes from the resharded states of the first."""
    pytest.importorskip("horovod.torch", reason="Horovod is not installed")
    discover = tmp_path / "hosts.sh"
    discover.write_text("#!/bin/sh\necho localhost:2\n")
    discover.chmod(0o755)
    launcher = [str(discover) if word == "./hosts.sh" else word for word in printed(ELASTIC)]
    assert str(discover) in launcher
    runs = []
    for steps in ("10", "20"):
        script = [str(EXAMPLES / f"{ELASTIC}.py"), "--steps", steps, "--checkpoints", str(tmp_path / "states")]
        runs += results(run(launcher, *script), 1)
    (_, first, begin, _), (_, resumed, end, ratio) = runs
    assert (first, resumed) == ("0", "10")
    assert float(end) < float(begin) and float(ratio) > 8
