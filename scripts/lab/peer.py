"""Peers of a small training on torchft, for scripts/lab/fleet.py.

It imports what they need once, then reads a line of JSON for each peer, ``{"folder", "lighthouse", "name", ...}`` with
those of :data:`DEFAULTS` that differ, starts the peer as a child, and prints its process number. A line with
``serves``, arguments of torchft's ``LighthouseServer``, starts a lighthouse. It ends, with its children, at the end of
its input.

A peer writes to ``FOLDER/NAME.jsonl`` a line of JSON for each event: ``joined``, ``round`` (committed), ``taken
back``, ``end``; each with the rounds that were committed, a hash of the common weights and of the states that all peers
have in common, the number of these, the peers of the last round, the memory in MB, and seconds so far: in quorums, in
commits and in ``LocalSteps.step()``. ``FOLDER/NAME.fate`` may have a point, one of :data:`POINTS`: when the peer next
comes there, it kills itself by SIGKILL. With ``end`` it ends after a local step.
"""

import argparse
import ctypes
import json
import os
import random
import signal
import socket
import sys
import threading
import time
import traceback
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch
import torch._dynamo  # optimizers need it, which takes seconds: once for all peers
import torchft
from torch import distributed, nn
from torchft.coordination import LighthouseServer

import hvd_compress
from hvd_compress.engine.hashes import hash_of
from hvd_compress.trainers import CombinedOptimizer

#: Where a peer may die. ``healing``: while it loads the state of another one; ``serving``: while it saves its own for
#: another one; ``voting``: when it has all averages; ``voted``: when all peers have them, before it commits.
POINTS = ("forward", "quorum", "exchange", "healing", "serving", "voting", "voted")

DEFAULTS = {
    "recipe": "low_bit",
    "options": {},
    "rounds": 10,
    "period": 2,
    "timeout": 5.0,
    "min_peers": 2,
    "quorum_retries": 40,
    "pause": 0.01,
    "width": 64,
    "averaged": False,  # whether biases move by averaged gradients
    "join": True,
    "host": "localhost",
    "namespace": None,  # of the network, with "host" as its address
}


class Fate:
    """Where this process is to die: what the file ``path`` says."""

    def __init__(self, path):
        self._path = path

    def meets(self, point):
        try:
            return self._path.read_text() == point
        except FileNotFoundError:
            return False

    def first(self, point):
        """Whether no other peer has come to this point before."""
        try:
            self._path.with_name(f"{point}.first").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def at(self, point):
        if self.meets(point):
            os.kill(os.getpid(), signal.SIGKILL)


class Training:
    def __init__(self, lighthouse, name, settings):
        torch.set_num_threads(1)
        self.settings, self.name, self.fate = settings, name, Fate(Path(settings["folder"], f"{name}.fate"))
        self.data = torch.Generator().manual_seed(int.from_bytes(name.encode(), "big") % 2**31)
        torch.manual_seed(self.data.initial_seed())
        self.model, self.optimizer = self.build()
        seconds = timedelta(seconds=settings["timeout"])
        self.store = distributed.TCPStore(settings["host"], 0, is_master=True, wait_for_workers=False)
        self.manager = torchft.Manager(
            pg=torchft.ProcessGroupGloo(timeout=seconds),
            load_state_dict=self.load,
            state_dict=self.save,
            min_replica_size=settings["min_peers"],
            use_async_quorum=False,
            timeout=seconds,
            quorum_timeout=4 * seconds,
            quorum_retries=settings["quorum_retries"],
            connect_timeout=seconds,
            store_addr=settings["host"],
            store_port=self.store.port,
            rank=0,
            world_size=1,
            lighthouse_addr=lighthouse,
            replica_id=name,
            hostname=settings["host"],
            heartbeat_interval=timedelta(milliseconds=50),
        )
        self.local, self.taken_back, self.seconds = self.local_steps(), 0.0, 0.0
        _die_in(self.local.compression.collectives, self.manager, self.fate)

    def build(self):
        """The model, of other weights in each peer (the first round makes them equal), and its optimizer."""
        width = self.settings["width"]
        layers = nn.Linear(16, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 4)
        model = nn.Sequential(*layers)
        if not self.settings["averaged"]:
            return model, torch.optim.AdamW(model.parameters(), lr=1e-3)
        parts = ([p for p in model.parameters() if (p.dim() == 2) == matrix] for matrix in (True, False))
        matrices, self.by_averages = (torch.optim.AdamW(part, lr=1e-3) for part in parts)
        return model, CombinedOptimizer([matrices, self.by_averages])

    def local_steps(self):
        recipe, options = getattr(hvd_compress.recipes, self.settings["recipe"]), self.settings["options"]
        if self.settings["averaged"]:
            options = {**options, "on_averaged_gradients": self.by_averages}
        return recipe(self.model, self.optimizer, self.settings["period"], process_group=self.manager, **options)

    def loss(self):
        x = torch.randn(8, 16, generator=self.data)
        return (self.model(x) - x[:, :4].sin()).square().mean()

    def save(self):
        if self.fate.meets("serving") and self.fate.first("serving"):
            self.fate.at("serving")
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load(self, state):
        self.fate.at("healing")
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def say(self, event, **more):
        weights, stats = self.local._rounds._common.weights, self.local.compression.collectives.report()
        states = [*self.by_averages.state.values()] if self.settings["averaged"] else []
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        found = {
            "event": event,
            "step": self.manager.current_step(),
            "hash": hash_of([*(w.common for w in weights), *(state[key] for state in states for key in sorted(state))]),
            "states": len(states),
            "same": all(torch.equal(weight.own, weight.common) for weight in weights),
            "peers": self.local.compression.collectives.size,
            "megabytes": round(pages * os.sysconf("SC_PAGE_SIZE") / 2**20, 2),
            "at": round(time.time(), 3),
            "seconds": [stats["quorum_seconds"], stats["commit_seconds"], self.seconds],
            **more,
        }
        print(json.dumps(found), flush=True)

    def run(self):
        if self.settings["join"]:
            self.local.join()
        self.say("joined")
        while self.manager.current_step() < self.settings["rounds"] and not self.fate.meets("end"):
            self.train()
        self.say("end", **self.result())

    def result(self):
        """What the last event says besides."""
        return {}

    def train(self):
        self.optimizer.zero_grad()
        loss = self.loss()
        self.fate.at("forward")
        loss.backward()
        self.optimizer.step()
        time.sleep(self.settings["pause"])
        begin = time.perf_counter()
        ended = self.local.step()
        self.seconds += time.perf_counter() - begin
        if ended:
            self.say("round")
        taken_back = self.local.compression.collectives.report()["rounds_taken_back"]
        if taken_back > self.taken_back:
            self.say("taken back")
        self.taken_back = taken_back


def _die_in(collectives, manager, fate):
    """Adds the points to die at that are inside of a round."""
    start, start_quorum, should_commit = collectives.start, manager.start_quorum, manager.should_commit
    chance = random.Random(os.getpid())

    def started(request, name):
        if not name:
            fate.at("voting")
        handle = start(request, name)
        if fate.meets("exchange") and chance.random() < 0.2:
            fate.at("exchange")
        return handle

    def quorum(*arguments, **options):
        if fate.meets("quorum"):
            threading.Timer(chance.random() * 0.02, fate.at, ["quorum"]).start()
        return start_quorum(*arguments, **options)

    def committed(*arguments, **options):
        fate.at("voted")
        return should_commit(*arguments, **options)

    collectives.start, manager.start_quorum, manager.should_commit = started, quorum, committed


def _enter(namespace, address):
    """Moves this process into a network namespace, and gives it its address as its host's name, which torchft sends to
    others."""
    libc, network, names = ctypes.CDLL(None, use_errno=True), 0x40000000, 0x04000000
    with open(f"/run/netns/{namespace}") as file:
        if libc.setns(file.fileno(), network) or libc.unshare(names):
            raise OSError(ctypes.get_errno(), f"{namespace} was not entered")
    socket.sethostname(address)
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"


def peer(training, settings):
    """In a child: trains, or serves as a lighthouse."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    log = Path(settings["folder"], settings["name"])
    for number, suffix in ((1, ".jsonl"), (2, ".err")):
        os.dup2(os.open(log.with_suffix(suffix), os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    code = 1
    try:
        if settings["namespace"]:
            _enter(settings["namespace"], settings["host"])
        if "serves" in settings:
            server = LighthouseServer(**settings["serves"])
            print(server.address(), flush=True)
            signal.pause()
        training(settings["lighthouse"], settings["name"], settings).run()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)  # torchft's threads would wait for their timeouts


def serve(training):
    """Starts peers of a class of trainings, as the input says."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the children
    children, warm = [], nn.Parameter(torch.zeros(1))
    warm.grad = torch.zeros(1)
    torch.optim.AdamW([warm]).step()  # which imports more
    print("ready", flush=True)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            peer(training, {**DEFAULTS, **json.loads(line)})
        children.append(child)
        print(child, flush=True)
    for child in children:
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", action="store_true", help="read them from the input")
    if parser.parse_args().peers:
        serve(Training)


if __name__ == "__main__":
    main()
