"""A fleet of peers on this machine, with a lighthouse, and what happens to it: peers and links come and go."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import suppress
from functools import partial
from pathlib import Path

LAB = Path(__file__).resolve().parent
ROOT = LAB.parents[1]


class Hosts:
    """Network namespaces of scripts/lab/netlab.sh, so many, each with a link of this rate, and ``links``, its further
    arguments. Needs root."""

    def __init__(self, count, rate, *links):
        self._lab, self._arguments = f"c{os.getpid()}", (str(count), rate, *links)
        self.numbers = range(1, count)

    def __enter__(self):
        self._netlab("up", *self._arguments)
        return self

    def __exit__(self, *error):
        self._netlab("down")

    def cut(self, number):
        """Drops all packets of a host's link from now on; its connections stay."""
        self._netlab("cut", str(number))

    def mend(self, number):
        self._netlab("mend", str(number))

    def name(self, number):
        return f"{self._lab}host{number}"

    def address(self, number):
        return f"10.77.0.{number + 1}"

    def _netlab(self, *arguments):
        command = ["bash", str(LAB / "netlab.sh"), "--lab", self._lab, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False, start_new_session=True)
        if done.returncode:
            raise RuntimeError(f"netlab.sh {arguments[0]} (root and iproute2 are needed): {done.stderr[-300:]}")


class Peer:
    """A child of scripts/lab/peer.py, and the events that it has written. ``dies``: where it is to die, if anywhere.
    ``host``: the number of its host, if it has one."""

    def __init__(self, folder, name, dies, start, host=None):
        self.name, self.host, self._path = name, host, folder / name
        #: Whether it may end: it was killed, or told to.
        self.ends = False
        if dies:
            self.tell(dies)
        self.number = start({"name": name})
        self._events, self._read = [], 0

    def events(self, kind=None):
        with suppress(FileNotFoundError), self._path.with_suffix(".jsonl").open() as log:
            log.seek(self._read)
            while (line := log.readline()).endswith("}\n"):
                self._events.append(json.loads(line))
                self._read = log.tell()
        return [event for event in self._events if kind in (None, event["event"])]

    @property
    def step(self):
        """Rounds that were committed when it has last written."""
        events = self.events()
        return events[-1]["step"] if events else 0

    @property
    def alive(self):
        with suppress(ProcessLookupError):
            os.kill(self.number, 0)
            return True
        return False

    def tell(self, word, ends=True):
        """Tells it where to die, or to ``end``. ``ends``: whether it may end then."""
        self.ends = ends
        self._path.with_suffix(".fate").write_text(word)

    def send(self, what):
        """Sends it a signal."""
        self.ends = self.ends or what == signal.SIGKILL
        with suppress(ProcessLookupError):
            os.kill(self.number, what)

    def errors(self):
        """The last lines that it has printed as errors."""
        lines = self._path.with_suffix(".err").read_text(errors="replace").splitlines()
        return "\n".join([line for line in lines if "[INFO]" not in line][-12:])


class Fleet:
    """A lighthouse and peers. A context that ends them all.

    Args:
        program: which starts the peers, as scripts/lab/peer.py.
        join_timeout, heartbeat_timeout: of the lighthouse, in seconds.
        hosts: :class:`Hosts` that are up: the first is the lighthouse's, the others are the peers'. None: localhost.
        settings: of all peers, see scripts/lab/peer.py.
    """

    def __init__(self, program=LAB / "peer.py", join_timeout=2.0, heartbeat_timeout=1.0, hosts=None, **settings):
        self.hosts, self._program = hosts, [sys.executable, str(program), "--peers"]
        self._temporary = tempfile.TemporaryDirectory(prefix="hvd-compress.")
        self.folder, self.settings = Path(self._temporary.name), settings
        with socket.socket(socket.AF_INET6) as free:
            free.bind(("::", 0))
            self._port = free.getsockname()[1]
        self.address = f"http://{hosts.address(0) if hosts else 'localhost'}:{self._port}"
        self._timeouts = join_timeout, heartbeat_timeout
        self.peers, self._lighthouse = [], None

    def __enter__(self):
        self._parent = subprocess.Popen(
            self._program,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{LAB}"},
            start_new_session=True,
        )
        try:
            self._parent.stdout.readline()  # ready
            self.start_lighthouse()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error):
        self._parent.communicate("")  # the end of its input
        self._temporary.cleanup()

    def start_lighthouse(self):
        join, heartbeat = (round(1000 * seconds) for seconds in self._timeouts)
        options = dict(bind=f"[::]:{self._port}", min_replicas=self.settings.get("min_peers", 2), quorum_tick_ms=20)
        options |= dict(join_timeout_ms=join, heartbeat_timeout_ms=heartbeat)
        place = {"namespace": self.hosts.name(0), "host": self.hosts.address(0)} if self.hosts else {}
        self._lighthouse = self._child({"serves": options, "name": "lighthouse", **place})
        self.wait(self._answers, 60, "the lighthouse")

    def _answers(self):
        sockets = Path(f"/proc/{self._lighthouse}/net/tcp6").read_text()  # of its host
        return any(f":{self._port:04X} " in line and " 0A " in line for line in sockets.splitlines())  # listening

    def kill_lighthouse(self):
        with suppress(ProcessLookupError):
            os.kill(self._lighthouse, signal.SIGKILL)

    def add(self, count=1, dies="", **settings):
        """Starts peers, with ``settings`` that differ from the others'. Returns the last of them."""
        for _ in range(count):
            host, own = None, dict(settings)
            if self.hosts is not None:
                used = [peer.host for peer in self.peers if peer.alive]
                host = min(self.hosts.numbers, key=used.count)
                own |= {"namespace": self.hosts.name(host), "host": self.hosts.address(host)}
            start = partial(self._start, own)
            self.peers.append(Peer(self.folder, f"peer{len(self.peers) + 1}", dies, start, host))
        return self.peers[-1]

    def _start(self, own, settings):
        return self._child({**self.settings, "lighthouse": self.address, **own, **settings})

    def _child(self, settings):
        line = json.dumps({"folder": str(self.folder), **settings})
        self._parent.stdin.write(f"{line}\n")
        self._parent.stdin.flush()
        return int(self._parent.stdout.readline())

    @property
    def staying(self):
        return [peer for peer in self.peers if not peer.ends]

    def wait(self, condition, timeout, what):
        """Returns when ``condition()`` is true. Raises ``TimeoutError`` after ``timeout`` seconds, ``RuntimeError`` if
        a peer has ended that was to stay."""
        deadline = time.monotonic() + timeout
        while not condition():
            for peer in self.staying:
                if not peer.alive and not any(event["event"] == "end" for event in peer.events()):
                    raise RuntimeError(f"{peer.name} has ended: {peer.errors()}")
            if time.monotonic() > deadline:
                states = ", ".join(f"{peer.name} at {peer.step}" for peer in self.staying)
                raise TimeoutError(f"{what} did not come in {timeout} s: {states}")
            time.sleep(0.02)

    def wait_for_rounds(self, count, timeout=60.0):
        """Waits until all peers that stay have committed so many more rounds, together."""
        first = max((peer.step for peer in self.staying), default=0)
        self.wait(lambda: all(peer.step >= first + count for peer in self.staying), timeout, f"{count} rounds")

    def different(self):
        """The numbers of committed rounds after which peers had different common weights."""
        hashes = defaultdict(set)
        for peer in self.peers:
            for event in peer.events("round"):
                hashes[event["step"]].add(event["hash"])
        return sorted(step for step, found in hashes.items() if len(found) > 1)
