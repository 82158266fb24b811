"""Process groups end as a whole, whatever ends them: their leader, a time limit, or signals."""

import os
import signal
import sys
from pathlib import Path

import pytest

from hvd_compress.cli import processes
from hvd_compress.cli.processes import Failed, exit_on_signals, run_group


def ended(file):
    """Whether the process whose number is in a file has ended; a zombie has."""
    try:
        state = Path(f"/proc/{file.read_text().strip()}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state.rpartition(")")[2].split()[0] == "Z"


@pytest.fixture
def shell(tmp_path):
    """Runs a shell script as a group, with a process in the background, which must have ended afterwards."""

    def run(script, timeout=60, **options):
        text = f"sleep 1000 & echo $! > {tmp_path}/pid; {script}"
        try:
            run_group(["bash", "-c", text], timeout, tmp_path / "log", {}, "the script", **options)
        finally:
            assert ended(tmp_path / "pid")

    return run


def test_the_group_ends_with_its_leader(shell):
    shell("exit 0")
    with pytest.raises(Failed, match="the script ended with status 3\n    bad luck"):
        shell("echo bad luck; exit 3")
    shell("exit 3", check=False)


def test_a_group_that_ignores_sigterm_is_killed(shell, monkeypatch):
    monkeypatch.setattr(processes, "GRACE", 0.5)
    with pytest.raises(Failed, match="was killed after 1 s"):
        shell("trap '' TERM; while :; do sleep 0.1; done", timeout=1)


def test_a_rank_that_its_launcher_has_left_behind_is_killed(tmp_path):
    """torchrun, ended while it starts a rank, which leads a group of its own."""
    rank = f"setsid bash -c 'echo $$ > {tmp_path}/pid; exec sleep 1000'"
    script = f"{rank} & while [ ! -s {tmp_path}/pid ]; do sleep 0.1; done"
    run_group(["bash", "-c", script], 60, tmp_path / "log", {}, "the script")
    assert ended(tmp_path / "pid")


@pytest.mark.parametrize("first", processes.SIGNALS)
def test_a_second_signal_does_not_keep_the_group_alive(default_signals, shell, monkeypatch, tmp_path, first):
    """Ctrl-C arrives while the group is being ended."""
    monkeypatch.setattr(processes, "GRACE", 0.5)
    script = f"trap 'kill -INT {os.getpid()}' TERM; touch {tmp_path}/trapped; while :; do sleep 0.1; done"

    def watch():
        if (tmp_path / "trapped").exists():
            signal.raise_signal(first)

    with pytest.raises(KeyboardInterrupt if first == signal.SIGINT else SystemExit) as caught, exit_on_signals():
        shell(script, watch=watch)
    assert first == signal.SIGINT or caught.value.code == 128 + first
    assert {number: signal.getsignal(number) for number in processes.SIGNALS} == processes.SIGNALS


def test_an_ignored_signal_stays_ignored(default_signals):
    """As SIGHUP under nohup."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with exit_on_signals():
        signal.raise_signal(signal.SIGHUP)
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def test_a_launch_does_not_inherit_the_number_of_this_program(monkeypatch):
    ours = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "ROLE_WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_USE_AGENT_STORE")
    others = ("OMPI_COMM_WORLD_RANK", "SLURM_NTASKS", "MY_RANK")
    for name in (*ours, *others):
        monkeypatch.setenv(name, "1")
    assert processes.inherited().keys() == os.environ.keys() - set(ours)
    # Not a rank: a job script has set an address for its launcher.
    monkeypatch.delenv("RANK")
    assert processes.inherited() == os.environ


@pytest.mark.parametrize("proxy", ["http_proxy", "HTTP_PROXY", "all_proxy", "https_proxy"])
@pytest.mark.parametrize(
    ("given", "also"),
    [({}, None), ({"no_proxy": "example.org"}, "example.org"), ({"NO_PROXY": ".example.org"}, "a.example.org")]
    + [({"no_proxy": "*"}, "example.org"), ({"no_proxy": "", "NO_PROXY": "localhost"}, None)],
    ids=str,
)
def test_a_launch_reaches_this_machine_without_a_proxy_and_others_as_before(monkeypatch, tmp_path, proxy, given, also):
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {proxy: "http://127.0.0.1:9", **given}.items():
        monkeypatch.setenv(name, value)
    script = "import socket; from urllib.request import getproxies, proxy_bypass as direct; print(len(getproxies()),"
    script += "direct('localhost:80'), direct('127.0.0.1:80'), direct(f'{socket.gethostname()}:80'), "
    log = tmp_path / "log"
    run_group([sys.executable, "-c", f"{script} direct('{also}'), direct('other.org'))"], 60, log, {}, "the script")
    count, *here, named, other = (eval(word) for word in log.read_text().split())
    assert count >= 1 and all(here) and bool(named) == bool(also) and bool(other) == (given.get("no_proxy") == "*")
