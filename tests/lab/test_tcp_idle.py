"""scripts/lab/tcp_idle.py: an exchange of all hosts with each other, and what a pause costs it."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import tcp_idle
from launch import ROOT, needs_hosts


@pytest.mark.parametrize("connections", [1, 3])
def test_all_receive_from_each_other_one(connections, monkeypatch):
    """On loopback addresses of this machine."""
    addresses, received = ["127.0.0.2", "127.0.0.3", "127.0.0.4"], []
    control = tcp_idle.CONTROLS.read_text().split()[0]

    class Selector(tcp_idle.selectors.DefaultSelector):
        def unregister(self, connection):
            received.append(connection)
            return super().unregister(connection)

    monkeypatch.setattr(tcp_idle.selectors, "DefaultSelector", Selector)

    def host(rank):
        peers = tcp_idle.Peers(rank, addresses, connections, control)
        for size in (1, 1_000_000):
            peers.exchange(size)
        return len(peers._sockets)

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(host, range(3))) == [2 * connections] * 3
    assert len(received) == 2 * 3 * 2 * connections


@needs_hosts
def test_a_pause_costs_round_trips():
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        pytest.skip("this machine has no TUN device")
    if "reno" not in tcp_idle.CONTROLS.read_text():
        pytest.skip("this kernel has no reno")
    given = ["--hosts=2", "--delay=20ms", "--bytes=400000", "--pause=1", "--times=2", "--controls", "reno"]
    command = [sys.executable, str(ROOT / "scripts" / "lab" / "tcp_idle.py"), *given]
    command += ["--columns", "no pause", "after a pause"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    (row,) = [line for line in done.stdout.splitlines() if line.startswith("| reno")]
    warm, cold = (float(cell) for cell in row.split("|")[2:4])
    assert 0.02 <= warm < cold and cold > 0.1, done.stdout
