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
        # Headers and negotiation come on top, so the interface may count a little more, and never less. With fp16 it
        # counts 2 to 5 % more, by the machine: why, is not known.
        assert 0.99 < row["tx_to_stats"] < (1.08 if row["method"] == "iwp 1/64 fp16" else 1.05), row
        assert row["dense_to_tx"] > {"iwp 1/32": 78, "iwp 1/64 fp16": 70}.get(row["method"], 0.98), row
