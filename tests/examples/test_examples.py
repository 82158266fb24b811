"""Each example runs on 2 or 4 ranks, by the command in its docstring. After half of the steps it resumes from its
checkpoint, with the result of one run."""

import ast
import itertools
import json
import os
import re
import shlex
import socket
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from launch import ROOT, end, finish, fork, start

EXAMPLES = ROOT / "examples"
MODULES = "torch._dynamo,torch.distributed.checkpoint,hvd_compress"
DRIVER, DYING, DAMAGED = (str(Path(__file__).with_name(name)) for name in ("resume.py", "dying.py", "damaged.py"))
#: Launches: packages, and the examples that need each. Of the trainers one is in the short run: tests/trainers has all.
LAUNCHES = {
    "two_ranks": {
        "torch": ["local_muon", "local_matrices", "ddp_sgd", "gpt_demo", "muon_ddp", "custom_method"],
        "accelerate": ["accelerate_loop"],
    },
    "two_nodes": {"torch": ["fsdp_gpt", "fsdp_local_muon"]},
    "horovod": {"horovod": ["horovod_sgd", "muon_horovod"]},
}
SLOW = {
    "other_trainers": {"lightning": ["lightning_callback"], "transformers": ["transformers_trainer"]},
    "two_nodes_of_lightning": {"lightning": ["lightning_fsdp"]},
    "restarts": {"torch": ["elastic_local_steps"]},
}
ELASTIC = "horovod_elastic"
#: By tests/docs/test_pages.py, with the program of the page.
TORCHFT = "torchft_local_steps"
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
    """What the ranks printed."""
    return finish(launched([*launcher, *arguments]), LIMIT)


def launched(command, endpoint="127.0.0.1:0", **more):
    """The process of a launcher. It and its ranks' interpreter are those of the tests' environment; torchrun takes the
    options that keep it on this machine, as in scripts/run.sh, from variables."""
    local = {"PET_RDZV_BACKEND": "c10d", "PET_RDZV_ENDPOINT": endpoint, **more}
    local |= {"PET_MASTER_ADDR": "127.0.0.1", "PET_LOCAL_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {"PATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONUNBUFFERED": "1"}
    return start(command, **environment, **local)


def test_every_example_is_tested_short_and_in_the_index():
    files = {path.stem: path.read_text() for path in EXAMPLES.glob("*.py")}
    tested = itertools.chain(*(names for examples_of in (LAUNCHES | SLOW).values() for names in examples_of.values()))
    assert files.keys() == {*tested, ELASTIC, TORCHFT}
    assert {name for name, text in files.items() if len(text.splitlines()) > 90} == set()
    assert set(re.findall(r"\((\w+)\.py\)", (EXAMPLES / "README.md").read_text())) == files.keys()


@pytest.mark.parametrize(
    "examples_of",
    [
        pytest.param(LAUNCHES.get(name) or SLOW[name], id=name, marks=[pytest.mark.slow] * (name in SLOW))
        for name in LAUNCHES | SLOW
    ],
)
def test_examples(examples_of, tmp_path):
    names = [name for package in examples_of if find_spec(package) for name in examples_of[package]]
    steps = 12 if "fsdp_gpt" in names else 24  # of SGD, more until something is learnt
    if not names:
        pytest.skip(f"not installed: {', '.join(examples_of)}")
    launcher, *others = map(printed, names)
    assert all(other == launcher for other in others)
    arguments = [str(tmp_path), str(steps), *(str(EXAMPLES / f"{name}.py") for name in names)]
    if launcher[:2] == ["torchrun", "--nproc-per-node"]:
        output = fork(launcher[2], ",".join([MODULES, *filter(find_spec, examples_of)]), DRIVER, arguments, LIMIT)
    else:
        output = run(launcher, DRIVER, *arguments)
    runs = results(output, 4 * len(names))
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


def test_a_damaged_checkpoint_is_passed_over_for_an_older_one(tmp_path):
    output = fork("2", MODULES, DAMAGED, [str(tmp_path), str(EXAMPLES / "elastic_local_steps.py")], LIMIT)
    parts = dict(zip(*[iter(reversed(re.split(r"ended (\w+)\n", output)[:-1]))] * 2, strict=True))
    assert len(parts) == 9, output[-3000:]
    begins = {name: [int(step) for step in re.findall(r" 7 steps from (\d+),", text)] for name, text in parts.items()}
    passed = {name: text.count("cannot be read: ") for name, text in parts.items()}
    assert begins.pop("every_checkpoint") == [] and passed.pop("every_checkpoint") == 3
    assert "every_checkpoint can be read" in parts["every_checkpoint"]
    assert begins.pop("nothing") == [6] and passed.pop("nothing") == 0
    assert begins.pop("moments_of_two_checkpoints_cut_off") == [2]
    assert passed.pop("moments_of_two_checkpoints_cut_off") == 2
    assert set(passed.values()) == {1} and all(begin == [4] for begin in begins.values()), begins


def test_local_steps_go_on_when_a_rank_and_a_machine_are_lost(tmp_path):
    """Three machines of one rank. A rank is killed, and the job goes on with three; then a machine, and it goes on with
    two."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    script = [str(EXAMPLES / "elastic_local_steps.py"), "--steps", "60", "--checkpoints", str(tmp_path / "states")]
    machines = []
    for number in range(3):
        conf = f"is_host={int(not number)},last_call_timeout=15,keep_alive_interval=1,keep_alive_max_attempt=5"
        launcher = ["torchrun", "--nnodes", "2:3", "--max-restarts", "3", "--rdzv-conf", conf]
        dies = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", **({"DIES": ""} if number == 2 else {})}
        machines.append(launched([*launcher, DYING, str(tmp_path), *script], f"127.0.0.1:{port}", **dies))
    try:
        outputs = [finish(machine, LIMIT) for machine in machines]
    finally:
        for machine in machines:
            end(machine)
    events = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    saved, loaded = ([e for e in events if e["event"] == kind] for kind in ("saved", "loaded"))
    found = {(e["ranks"], e["step"], e["rank"]): e for e in saved}
    order = [(3, 12), (3, 24), (3, 36), (2, 48), (2, 60)]
    assert sorted(found) == sorted((n, step, rank) for n, step in order for rank in range(n)), outputs
    assert len(found) == len(saved)
    assert sorted((e["ranks"], e["step"]) for e in loaded) == [(2, 36)] * 2 + [(3, 24)] * 3
    for ranks, step in order:
        assert len({found[ranks, step, rank]["weights"] for rank in range(ranks)}) == 1, (ranks, step)
    losses = [found[ranks, step, 0]["loss"] for ranks, step in order]
    print(losses)
    assert losses == sorted(losses, reverse=True) and losses[-1] < 0.9 * losses[2]
    # Nothing that was owed is lost: the mean over the ranks is what training applies in the end.
    before, after = (residuals(tmp_path, name) for name in ("saved-36-3", "loaded-36-2"))
    assert any(tensor.abs().max() > 1e-3 for tensor in before.values())
    for name, tensor in before.items():
        torch.testing.assert_close(after[name], tensor, rtol=0, atol=1e-6)
    text = "".join(outputs[:2])
    assert sorted(line[:3] for line in re.findall(LINE, text)) == [("0", "60", "36"), ("1", "60", "36")], text[-3000:]


def residuals(folder, name):
    """The mean over the ranks, float64."""
    states = [torch.load(file, weights_only=True) for file in folder.glob(f"{name}-?.pt")]
    assert len(states) == int(name[-1])
    return {
        key: sum(state[key].double() for state in states) / len(states)
        for key, tensor in states[0].items()
        if tensor is not None
    }
