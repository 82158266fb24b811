"""Each example runs on 2 ranks; after half of the steps it resumes from its checkpoint, with the result of one run."""

import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from launch import ROOT, finish, launch, start

EXAMPLES = ROOT / "examples"
DRIVER = str(Path(__file__).with_name("resume.py"))
#: Examples that torchrun starts, and the package that each needs.
TORCHRUN = {
    "ddp_sgd": "torch",
    "gpt_demo": "torch",
    "custom_method": "torch",
    "lightning_callback": "lightning",
    "accelerate_loop": "accelerate",
    "transformers_trainer": "transformers",
}
HOROVOD = ("horovod_sgd", "horovod_elastic")
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
    whole, half, resumed = results(output, 3)
    assert [int(run[0]) for run in (whole, half, resumed)] == [steps, steps // 2, steps]
    assert resumed[1] in ("", str(steps // 2))
    assert resumed[2] == whole[2], f"training differs after resuming: {output}"
    assert float(whole[2]) < float(half[2]), "nothing was learnt"
    assert float(whole[3]) > 8


def torchrun(*arguments):
    """The launcher as scripts/run.sh calls it, but with the interpreter of the tests."""
    local = ["--nnodes", "1", "--nproc-per-node", "2", "--master-addr", "127.0.0.1", "--local-addr", "127.0.0.1"]
    command = [sys.executable, "-m", "torch.distributed.run", *local, "--rdzv-endpoint", "127.0.0.1:0"]
    environment = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
    return finish(start([*command, "--rdzv-backend", "c10d", *arguments], **environment), LIMIT)


def test_every_example_is_tested_short_and_in_the_index():
    files = {path.stem: path.read_text() for path in EXAMPLES.glob("*.py")}
    assert files.keys() == {*TORCHRUN, *HOROVOD}
    assert {name for name, text in files.items() if len(text.splitlines()) >= 80} == set()
    assert set(re.findall(r"\((\w+)\.py\)", (EXAMPLES / "README.md").read_text())) == files.keys()


@pytest.mark.parametrize("name", TORCHRUN)
def test_example_under_torchrun(name, tmp_path):
    if find_spec(TORCHRUN[name]) is None:
        pytest.skip(f"{TORCHRUN[name]} is not installed")
    steps = 20
    check_resumed(torchrun(DRIVER, str(EXAMPLES / f"{name}.py"), str(tmp_path), str(steps)), steps)


def test_example_under_horovod(tmp_path):
    pytest.importorskip("horovod.torch", reason="Horovod is not installed")
    arguments = ["2", DRIVER, str(EXAMPLES / "horovod_sgd.py"), str(tmp_path), "20"]
    check_resumed(launch("run.sh", arguments, LIMIT), 20)


def test_elastic_example(tmp_path):
    """Two jobs: the second one resumes from the resharded states of the first."""
    pytest.importorskip("horovod.torch", reason="Horovod is not installed")
    discover = tmp_path / "hosts.sh"
    discover.write_text("#!/bin/sh\necho localhost:2\n")
    discover.chmod(0o755)
    horovodrun = [str(Path(sys.executable).with_name("horovodrun")), "-np", "2", "--min-np", "1", "--gloo"]
    horovodrun += ["--network-interfaces", "lo", "--host-discovery-script", str(discover), sys.executable]
    runs = []
    for steps in ("10", "20"):
        script = [str(EXAMPLES / "horovod_elastic.py"), "--steps", steps, "--checkpoints", str(tmp_path / "states")]
        output = finish(start([*horovodrun, *script], OMP_NUM_THREADS="1", PYTHONUNBUFFERED="1"), LIMIT)
        runs += results(output, 1)
    (_, first, begin, _), (_, resumed, end, ratio) = runs
    assert (first, resumed) == ("0", "10")
    assert float(end) < float(begin) and float(ratio) > 8
