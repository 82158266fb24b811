"""scripts/lab/netlab.sh: the hosts' links; and stats() against the network interface's counter, on four hosts."""

import json
import os
import re
import subprocess
import sys

import pytest
from launch import PARALLEL, ROOT, launch, needs_hosts

pytestmark = needs_hosts

# A lab of this process: `up` and `down` kill what runs in a lab of the same name.
LAB = ["--lab", f"t{os.getpid()}"]


def netlab(*arguments):
    command = ["bash", str(ROOT / "scripts" / "lab" / "netlab.sh"), *LAB, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def machine_can(links):
    """Whether this machine makes a network namespace with a link, and a TUN device for ``links`` with a delay."""
    name = f"{LAB[1]}try"
    commands = [
        ["ip", "netns", "add", name],
        ["ip", "-n", name, "link", "add", "a", "type", "veth", "peer", "name", "b"],
    ]
    done = [subprocess.run(command, capture_output=True, check=False).returncode for command in commands]
    subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    return not any(done) and (not links or os.access("/dev/net/tun", os.R_OK | os.W_OK))


@pytest.fixture
def hosts():
    """A function that makes so many hosts, with links of a rate, and of a delay if one is given."""

    def up(count, rate, *links):
        done = netlab("up", str(count), rate, *links)
        if done.returncode and not machine_can(links):
            pytest.skip(f"this machine gives no network namespaces: {done.stderr.strip()[-200:]}")
        assert not done.returncode, done.stderr

    try:
        yield up
    finally:
        assert netlab("down").returncode == 0


@pytest.mark.parametrize("rate, burst", [("100mbit", 32_000), ("1gbit", 250_000), ("2.5Gbit", 625_000)])
def test_a_link_sends_two_milliseconds_of_its_rate_at_once(hosts, rate, burst):
    hosts(1, rate)
    command = ["ip", "netns", "exec", f"{LAB[1]}host0", "tc", "-j", "qdisc", "show", "dev", "eth0"]
    shaped = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)[0]["options"]
    # The kernel counts in ticks.
    assert shaped["burst"] == pytest.approx(burst, rel=0.01)


def test_a_wrong_rate_leaves_the_hosts_alone(hosts):
    hosts(1, "none")
    for wrong in (["fast"], ["none", "far"], ["none", "--up", "fast"]):
        refused = netlab("up", "1", *wrong)
        assert refused.returncode == 2 and f"got '{wrong[-1]}'" in refused.stderr, wrong
    assert f"{LAB[1]}host0" in subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout


ECHO = """
import socket, sys
with socket.create_server(("", 5000)) as server:
    print("ready", flush=True)
    connection = server.accept()[0]
    while data := connection.recv(1):
        connection.send(data)
"""
CLIENT = """
import socket, sys
connection = socket.create_connection(("10.77.0.2", 5000))
for seconds in sys.stdin:
    connection.settimeout(float(seconds))
    connection.send(b"x")
    try:
        print("came" if connection.recv(1) else "closed", flush=True)
    except TimeoutError:
        print("lost", flush=True)
"""


@pytest.mark.parametrize("links", [[], ["1ms"]], ids=["bridge", "delayed"])
def test_a_cut_link_loses_packets_and_keeps_its_connections(hosts, links):
    hosts(2, "none", *links)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    inside = [["ip", "netns", "exec", f"{LAB[1]}host{n}", sys.executable, "-c"] for n in (0, 1)]
    with subprocess.Popen([*inside[1], ECHO], **pipes) as server:
        assert server.stdout.readline() == "ready\n"
        with subprocess.Popen([*inside[0], CLIENT], **pipes) as client:

            def answer(seconds):
                print(seconds, file=client.stdin, flush=True)
                return client.stdout.readline().strip()

            assert answer(20) == "came"
            assert netlab("cut", "1").returncode == 0
            assert answer(1) == "lost"
            assert netlab("mend", "1").returncode == 0
            assert answer(20) == "came"
            client.stdin.close()


TIMED = """
import socket, sys, time
connection = socket.create_connection(("10.77.0.2", 5000))
connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
for size in map(int, sys.argv[1:]):
    begin = time.perf_counter()
    connection.sendall(bytes(size))
    received = 0
    while received < size:
        received += len(connection.recv(1 << 20))
    print(time.perf_counter() - begin)
"""


def seconds_of(sizes):
    """Of messages from one host to another one and back."""
    inside = [["ip", "netns", "exec", f"{LAB[1]}host{n}", sys.executable, "-c"] for n in (0, 1)]
    echo = ECHO.replace("recv(1)", "recv(1 << 20)").replace(".send(", ".sendall(")
    with subprocess.Popen([*inside[1], echo], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        server.stdout.readline()
        client = subprocess.run([*inside[0], TIMED, *map(str, sizes)], capture_output=True, text=True, check=True)
    return [float(line) for line in client.stdout.split()]


@pytest.mark.parametrize("delay", [5, 40])
def test_a_round_trip_takes_two_delays(hosts, delay):
    hosts(2, "none", f"{delay}ms")
    assert 2 * delay <= 1000 * min(seconds_of([1] * 10)) < 2 * delay + 20


def test_doctor_measures_the_round_trips_between_hosts(hosts):
    pytest.importorskip("typer", reason="the extra [cli] is not installed")
    hosts(3, "none", "20ms")
    output = launch("lab/netlab.sh", [*LAB, "run", "--ddp", "3", "-m", "hvd_compress", "doctor", "--network"], 100)
    median = re.search(r"median ([\d.]+) ms; longest", output)
    assert median and 40 <= float(median[1]) < 60, output[-3000:]


@pytest.mark.parametrize(
    "links", ["--up 4mbit", "--down 4mbit", "10ms --up 4mbit --down 8mbit", "--up 4mbit --down 4mbit"]
)
def test_a_link_has_a_rate_in_each_direction(hosts, links):
    """Both directions of a message of 0.5 s are on their way at the same time. A bridge, for links of one rate, sends
    the first 32 KB at once."""
    hosts(2, "none", *links.split())
    (seconds,) = seconds_of([250_000])
    assert seconds > (0.43 if links.endswith("--down 4mbit") else 0.5), seconds


def test_ranks_of_all_hosts_share_a_session(hosts, tmp_path):
    """Linux divides the cores between sessions first."""
    pytest.importorskip("horovod.torch", reason="Horovod is not installed")
    hosts(2, "none")
    script = tmp_path / "session.py"
    script.write_text("import os\nprint('rank on', os.uname().nodename, os.getsid(0))")
    output = launch("lab/netlab.sh", [*LAB, "run", "2x2", str(script)], timeout=60)
    rows = [line.split()[2:] for line in output.splitlines() if line.startswith("rank on")]
    assert sorted(host for host, _ in rows) == [f"{LAB[1]}host{i}" for i in (0, 0, 1, 1)], output[-3000:]
    assert len({session for _, session in rows}) == 1


@pytest.mark.slow
def test_stats_agree_with_the_network_interface(hosts):
    pytest.importorskip("horovod.torch", reason="Horovod is not installed")
    hosts(4, "none")
    output = launch("lab/netlab.sh", [*LAB, "run", "4", str(PARALLEL / "check_wire.py")], timeout=240)
    rows = [json.loads(line.split("wire ", 1)[1]) for line in output.splitlines() if "wire {" in line]
    assert len(rows) == 20, output[-3000:]
    for row in rows:
        # The interface also counts headers and negotiation. With fp16 it counts 2 to 5 % more, for an unknown reason.
        assert 0.99 < row["tx_to_stats"] < (1.08 if row["method"] == "iwp 1/64 fp16" else 1.05), row
        assert row["dense_to_tx"] > {"iwp 1/32": 78, "iwp 1/64 fp16": 70}.get(row["method"], 0.98), row
