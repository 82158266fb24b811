"""hvd-compress doctor: a real launch of two ranks, and the faults that it finds."""

import importlib.metadata
import os
import subprocess
import sys
import time

import pytest

pytest.importorskip("typer", reason="the extra [cli] is not installed")

from typer.testing import CliRunner

from hvd_compress import ops
from hvd_compress.cli import doctor, launchers
from hvd_compress.cli.app import app
from hvd_compress.cli.processes import run_group


def run(*arguments):
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, arguments)


def test_two_ranks_of_every_host_exchange():
    done = run("doctor")
    assert done.exit_code == 0, done.output
    try:
        importlib.metadata.version("horovod")
        hosts = 2
    except importlib.metadata.PackageNotFoundError:
        hosts = 1
    assert done.output.count("two ranks exchange") == hosts
    assert ops.CPU_CAPABILITY in done.output and "20 of 20 compiled" in done.output


def test_peers_on_torchft_need_no_proxy(monkeypatch):
    """A state goes from peer to peer by HTTP."""
    pytest.importorskip("torchft", reason="torchft is not installed")
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    found = doctor.torchft(100, exchange=True)
    assert found.found.endswith("two peers end rounds"), found


def test_a_fault_is_named_with_its_cure(monkeypatch):
    monkeypatch.setattr(ops, "MISSING", "the extension is not built")
    done = run("doctor", "--no-exchange")
    assert done.exit_code == 1
    assert "the extension is not built" in done.output and doctor.build() in done.output


def test_commands_are_for_the_place_that_the_package_comes_from(monkeypatch, tmp_path):
    root = tmp_path / "my checkout"
    root.mkdir()
    monkeypatch.setattr(doctor, "__file__", str(root / "hvd_compress" / "cli" / "doctor.py"))
    install = f"A=1 {sys.executable} -m pip install --force-reinstall --no-deps --no-build-isolation ."
    setup = "A=1 bash scripts/setup.sh && .venv/bin/python -m hvd_compress doctor"
    assert doctor.build("A=1") == f"in a checkout of hvd_compress: {install}"
    before = "in a checkout of hvd_compress, whose .venv is used from now on"
    assert doctor.set_up("A=1") == f"{before}: rm -f .venv/.hvd_compress && {setup}"
    (root / "setup.py").touch()
    assert doctor.build("A=1") == f"cd '{root}' && A=1 {sys.executable} setup.py build_ext --inplace"
    command = f"cd '{root}' && rm -f .venv/.hvd_compress && {setup}"
    assert doctor.set_up("A=1") == f"uses .venv in the checkout from now on: {command}"
    monkeypatch.setattr(sys, "prefix", str(root / ".venv"))
    assert doctor.set_up("A=1") == command


def test_old_versions_are_faults(monkeypatch):
    assert doctor.python((3, 9, 18)).fault and not doctor.python((3, 10, 0)).fault
    monkeypatch.setattr("torch.__version__", "2.9.1+cu130")
    assert [bool(finding.fault) for finding in doctor.torch_and_cuda()] == [True, False]
    monkeypatch.setattr("torch.__version__", "2.11.0")
    assert not any(finding.fault for finding in doctor.torch_and_cuda())


def test_a_missing_horovod_is_no_fault_and_a_broken_one_is(tmp_path, monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    with monkeypatch.context() as patch:
        patch.setattr(importlib.metadata, "version", missing)
        (found,) = doctor.horovod(60, False)
        assert "not installed" in found.found and not found.fault
    broken = tmp_path / "horovod"
    broken.mkdir()
    (broken / "__init__.py").write_text("raise ImportError('undefined symbol: of another torch')")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.28.1")
    (found,) = doctor.horovod(60, False)
    assert "undefined symbol: of another torch" in found.fault and found.cure == doctor.set_up()


def test_a_failed_exchange_by_mpi_shows_how_to_see_more(monkeypatch):
    """mpirun was found and Horovod has MPI: installing Open MPI would not repair it."""
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.28.1")
    flags = subprocess.CompletedProcess([], 0, stdout="1 1 0 0 0\n", stderr="")
    monkeypatch.setattr(doctor.subprocess, "run", lambda *_, **__: flags)
    monkeypatch.setattr(launchers, "program", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(launchers, "mpirun", lambda ranks, *module: (["false", *module], {"A": "1"}))
    installed, exchange = doctor.horovod(60, True)
    assert not installed.fault and exchange.fault and "pip install" not in exchange.cure
    assert exchange.cure.endswith(": A=1 false hvd_compress.cli.pair horovod")


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("built", ["0 0 0", "1 1 0", "0 1 0", "0 0 1"])
def test_a_horovod_without_gpu_operations_is_a_fault_beside_a_gpu(monkeypatch, gpu, built):
    """``built``: with NCCL, for CUDA, for ROCm."""
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.28.1")
    flags = subprocess.CompletedProcess([], 0, stdout=f"0 1 {built}\n", stderr="")
    monkeypatch.setattr(doctor.subprocess, "run", lambda *_, **__: flags)
    monkeypatch.setattr("torch.cuda.is_available", lambda: gpu)
    (found,) = doctor.horovod(60, False)
    assert ("HOROVOD_GPU_OPERATIONS=NCCL" in found.cure) == bool(found.fault) == (gpu and built == "0 0 0")


def test_ranks_that_hang_are_killed(tmp_path):
    pid = tmp_path / "pid"

    def hanging(ranks, *module):
        return ["bash", "-c", f"sleep 1000 & echo $! > {pid}; wait"], {}

    begin = time.monotonic()
    found = doctor.two_ranks("x", hanging, "ddp", 1.0)
    assert time.monotonic() - begin < 300 and "killed after 1 s" in found.fault
    # A zombie of an init that does not reap counts as dead.
    state = subprocess.run(["ps", "-o", "stat=", "-p", pid.read_text()], capture_output=True, text=True, check=False)
    assert state.stdout.strip()[:1] in ("", "Z")


class Ranks:
    """Of hosts in this process: the settings of each, and the seconds to all higher ones."""

    rank, size = 0, 3

    def __init__(self, milliseconds, *settings):
        trips = [[0.0, 1e-3, 1e-3 * milliseconds], [0.0, 0.0, 2e-3], [0.0, 0.0, 0.0]]
        self._rows = [(f"host{n}", *pair, trips[n]) for n, pair in enumerate(settings)]

    def round_trips(self):
        return self._rows[0][-1]

    def gather(self, row):
        assert len(row) == len(self._rows[0])
        return self._rows


CUBIC, KEPT, BBR, UNKNOWN = ("1", "cubic"), ("0", "cubic"), ("1", "bbr"), ("unknown", "unknown")


@pytest.mark.parametrize(
    "milliseconds, settings, slow",
    [
        (50, (CUBIC, KEPT, CUBIC), "host0, host2"),
        (50, (KEPT, BBR, UNKNOWN), ""),
        (3, (CUBIC, CUBIC, CUBIC), ""),
    ],
)
def test_the_network_between_ranks(milliseconds, settings, slow):
    """What TCP forgets in a pause matters on links with a delay."""
    trips, tcp = doctor.between_ranks(Ranks(milliseconds, *settings))
    assert trips.found == f"median 2 ms; longest {milliseconds} ms, from host0 to host2" and not trips.fault
    assert tcp.cure == (f"sysctl -w net.ipv4.tcp_slow_start_after_idle=0 on {slow}" if slow else "")
    assert bool(tcp.fault) == bool(slow) and all(control in tcp.found for _, control in settings)


def test_the_network_between_launched_ranks(tmp_path):
    """Three, each with two others: the first one prints."""
    command, environment = launchers.torchrun(3, "hvd_compress", "doctor", "--network")
    run_group(command, 100, tmp_path / "log", environment, "doctor")
    output = (tmp_path / "log").read_text()
    assert output.count("round trip") == 1 and "All is well" in output, output


def test_the_network_is_for_several_ranks(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    done = run("doctor", "--network")
    assert done.exit_code == 2 and "torchrun" in done.output


def test_a_rank_alone_does_not_exchange():
    found = doctor.two_ranks("x", lambda _, *module: launchers.torchrun(1, *module), "ddp", 100)
    assert "single ranks" in found.fault and "hvd_compress.cli.pair" in found.cure


@pytest.mark.parametrize("name", ["typer", "rich"])
def test_without_the_extra_one_line_says_what_to_install(name):
    script = f"import sys, runpy; sys.modules['{name}'] = None; runpy.run_module('hvd_compress', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert f"needs {name}: {sys.executable} -m pip install typer rich" in done.stderr
