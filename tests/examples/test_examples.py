"""Each example runs on 2 or 4 ranks, by the command in its docstring. After half of the steps it resumes from its
checkpoint, with the result of one run."""

import ast
import itertools
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
#: Launches: packages, and the examples that need each.
LAUNCHES = {
    "two_ranks": {
        "torch": ["local_muon", "ddp_sgd", "gpt_demo", "muon_ddp", "custom_method"],
        "lightning": ["lightning_callback"],
        "accelerate": ["accelerate_loop"],
        "transformers": ["transformers_trainer"],
    },
    "two_nodes": {"torch": ["fsdp_gpt", "fsdp_local_muon"], "lightning": ["lightning_fsdp"]},
    "horovod": {"horovod": ["horovod_sgd", "muon_horovod"]},
}
ELASTIC = "horovod_elastic"
#: Seconds of a launch, on a machine that is busy otherwise.
LIMIT = 480.0
LINE = r"rank (\d): (\d+) steps(?: from (\d+))?, loss (\d+\.\d+), (\d+\.\d|nan) times fewer bytes"


def results(output, runs):
    """(steps, first step or "", loss, ratio) of each run, equal on the first two ranks but for the ratio."""
    found = re.findall(LINE, output)
    of_ranks = [[line[1:] for line in found if line[0] == rank] for rank in "01"]
    assert all(len(lines) == runs for lines in of_ranks), output[-3000:]
    assert [line[:3] for line in of_ranks[0]] == [line[:3] for line in of_ranks[1]], "replicas differ"
    return of_ranks[0]


def check_resumed(whole, half, resumed, again, steps):
    assert [int(run[0]) for run in (whole, half, resumed)] == [steps, steps // 2, steps]
    assert resumed[1] in ("", str(steps // 2)) and again[1] in ("", str(steps))
    assert resumed[2] == whole[2], "training differs after resuming"
    if int(again[0]) == steps:  # transformers' Trainer takes one more step
        assert again[2] == resumed[2], "a run without a step left differs"
        assert again[3] in (resumed[3], "nan")  # Lightning's callbacks are not called
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
    tested = itertools.chain(*(names for examples_of in LAUNCHES.values() for names in examples_of.values()))
    assert files.keys() == {*tested, ELASTIC}
    assert {name for name, text in files.items() if len(text.splitlines()) > 90} == set()
    assert set(re.findall(r"\((\w+)\.py\)", (EXAMPLES / "README.md").read_text())) == files.keys()


@pytest.mark.parametrize("examples_of", LAUNCHES.values(), ids=LAUNCHES)
def test_examples(examples_of, tmp_path):
    names, steps = [name for package in examples_of if find_spec(package) for name in examples_of[package]], 24
    if not names:
        pytest.skip(f"not installed: {', '.join(examples_of)}")
    launcher, *others = map(printed, names)
    assert all(other == launcher for other in others)
    scripts = [str(EXAMPLES / f"{name}.py") for name in names]
    runs = results(run(launcher, DRIVER, str(tmp_path), str(steps), *scripts), 4 * len(names))
    print(names, *runs, sep="\n")
    for first in range(0, len(runs), 4):
        check_resumed(*runs[first : first + 4], steps)


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
