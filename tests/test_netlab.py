"""The wire ratio is no claim of ours alone: stats() against the network interface's own counter, on four hosts."""

import json
import subprocess

import pytest
from launch import PARALLEL, ROOT, launch, needs_hosts

pytest.importorskip("horovod.torch", reason="Horovod is not installed")
pytestmark = needs_hosts


@pytest.fixture
def four_hosts():
    netlab = ["bash", str(ROOT / "scripts" / "netlab.sh")]
    up = subprocess.run([*netlab, "up", "4", "none"], capture_output=True, text=True, check=False)
    if up.returncode:
        subprocess.run([*netlab, "down"], check=False)
        pytest.skip(f"this machine gives no network namespaces: {up.stderr.strip()[-200:]}")
    yield
    subprocess.run([*netlab, "down"], check=True)


def test_stats_agree_with_the_network_interface(four_hosts):
    output = launch("netlab.sh", ["run", "4", str(PARALLEL / "check_wire.py")], timeout=240)
    rows = [json.loads(line.split("wire ", 1)[1]) for line in output.splitlines() if "wire {" in line]
    assert len(rows) == 20, output[-3000:]
    for row in rows:
        # Headers and negotiation come on top, so the interface may count a little more, and never less. Negotiation
        # goes by time: on a slow machine it is up to 5 % of the smallest messages.
        assert 0.99 < row["tx_to_stats"] < 1.1, row
    assert all(row["dense_to_tx"] > 70 for row in rows if row["method"] in ("iwp 1/64 fp16", "iwp 1/32"))
