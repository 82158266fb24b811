"""Peers that exchange gradients in each step on torchft, for tests/peers/test_hooks_on_torchft.py.

It imports what they need once, then reads a line of JSON for each rank, ``{"lighthouse", "folder", "name", "method",
"steps", "fault", "host", "rank", "ranks", "port"}``, starts it as a child, and prints its process number. ``method`` is
of ``tests/methods.py``. ``host`` is ``ddp`` or ``fsdp``; ``rank`` of the ``ranks`` of the peer ``name``, whose store is
at ``port``. ``fault`` is ``none``; ``KIND@STEP``, a place in step STEP where the peer kills itself: ``forward``,
``exchange``, ``vote``, ``voted``; or ``fails@STEP``, where backward raises an error when it has passed some layers, and
the peer goes on. A rank writes a line of JSON for each step to ``FOLDER/NAME.RANK.jsonl``.
"""

import json
import os
import signal
import sys
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch
import torchft
from managers import manager_of, run_child
from methods import METHODS
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import hvd_compress
from hvd_compress.engine.agreement import hash_of


class Failed(Exception):
    pass


class Fails(torch.autograd.Function):
    """Its backward pass raises an error if ``fails()``."""

    @staticmethod
    def forward(ctx, x, fails):
        ctx.fails = fails
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if ctx.fails():
            raise Failed
        return gradient, None


class Peer:
    def __init__(self, lighthouse, name, method, fault, host, rank, ranks, port):
        torch.set_num_threads(1)
        seconds = timedelta(seconds=8)
        self.store = distributed.TCPStore("localhost", port, ranks, is_master=rank == 0, wait_for_workers=False)
        self.model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4))
        store = distributed.PrefixStore("group", self.store)
        distributed.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=2 * seconds)
        if host == "fsdp":
            mesh = init_device_mesh("cpu", (ranks,))
            for module in (self.model[4], self.model[2], self.model):
                fully_shard(module, mesh=mesh)
        plain = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.0 if "demo" in method else 0.9)
        self.plain, self.kind, self.at = plain, *(*fault.split("@"), "-1")[:2]
        where = {"rank": rank, "world_size": ranks, "replica_id": name, "lighthouse_addr": lighthouse}
        self.manager = manager_of(self, seconds, min_replica_size=2, store_port=self.store.port, **where)
        self.compression = METHODS[method](self.model, process_group=self.manager, min_numel=512)
        self.model[1].register_forward_hook(lambda m, x, y: Fails.apply(y, lambda: self.at_fault("fails")))
        self.wrapped = self.model
        if host == "fsdp":
            hvd_compress.register_fsdp_hooks(self.model, self.compression)
        else:
            self.wrapped = DistributedDataParallel(self.model, find_unused_parameters=True, bucket_cap_mb=0.01)
            self.wrapped.register_comm_hook(self.compression, hvd_compress.ddp_hook)
        self.optimizer = torchft.optim.OptimizerWrapper(self.manager, plain)
        self.data = torch.Generator().manual_seed(100 * sum(map(ord, name)) + rank)
        self._die_inside()

    def local(self):
        """This rank's weights: shards of FSDP2's."""
        return [getattr(p, "_local_tensor", p).detach() for p in self.model.parameters()]

    def save(self):
        momentum = [getattr(s["momentum_buffer"], "_local_tensor", s["momentum_buffer"]) for s in self.states()]
        return {"weights": [w.clone() for w in self.local()], "momentum": [m.clone() for m in momentum]}

    def states(self):
        return [s for p in self.model.parameters() if "momentum_buffer" in (s := self.plain.state.get(p, {}))]

    def load(self, state):
        for own, weight in zip(self.local(), state["weights"], strict=True):
            own.copy_(weight)
        if state["momentum"] and not self.states():
            for p in self.model.parameters():
                self.plain.state[p]["momentum_buffer"] = torch.zeros_like(p)
        for own, momentum in zip(self.states(), state["momentum"], strict=True):
            getattr(own["momentum_buffer"], "_local_tensor", own["momentum_buffer"]).copy_(momentum)

    def at_fault(self, kind):
        return self.kind == kind and self.manager.current_step() >= int(self.at)

    def die_at(self, kind):
        if self.at_fault(kind):
            os.kill(os.getpid(), signal.SIGKILL)

    def _die_inside(self):
        collectives, should_commit = self.compression.collectives, self.manager.should_commit
        start = collectives.start

        def started(request, name):
            if not name:
                self.die_at("vote")
            handle = start(request, name)
            self.die_at("exchange")
            return handle

        def committed():
            self.die_at("voted")
            return should_commit()

        collectives.start, self.manager.should_commit = started, committed

    def step(self):
        x = torch.randn(8, 16, generator=self.data)
        before = self.manager.current_step()
        self.optimizer.zero_grad()
        predicted = self.wrapped(x)
        self.die_at("forward")
        (predicted - x[:, :4].sin()).square().mean().backward()
        self.optimizer.step()
        counted = self.manager.current_step() == before + 1
        found = {
            "event": "step" if counted else "taken back",
            "step": self.manager.current_step(),
            "hash": hash_of(self.local()),
            "peers": self.compression.stats()["peers"],
            "at": time.time(),
        }
        print(json.dumps(found), flush=True)

    def run(self, steps):
        while self.manager.current_step() < steps:
            try:
                self.step()
            except Failed:
                self.kind = "none"
                self.model.reset_iter_state()  # FSDP2 asks for it
            time.sleep(0.02)


def train(lighthouse, folder, name, method, steps, fault, host="ddp", rank=0, ranks=1, port=0):
    """In a child."""
    run_child(
        Path(folder, f"{name}.{rank}"),
        lambda: Peer(lighthouse, name, method, fault, host, rank, ranks, port).run(steps),
    )


def main():
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the children
    children = []
    print("ready", flush=True)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            train(**json.loads(line))
        children.append(child)
        print(child, flush=True)
    for child in children:
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)


if __name__ == "__main__":
    main()
