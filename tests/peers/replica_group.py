"""A replica group of two ranks on torchft, whose model is sharded by FSDP2, for test_shards.py:
replica_group.py FOLDER NAME LIGHTHOUSE SETTINGS

``SETTINGS``: JSON of those of :data:`DEFAULTS` that differ. As torchrun would, it ends when one rank has failed, with
the other. A rank writes to ``FOLDER/NAME-RANK.jsonl`` a line of JSON for each event: ``joined``, ``round`` (committed),
``taken back``, and ``end``, when it has saved its state to ``FOLDER/NAME-RANK.pt``. ``FOLDER/NAME-RANK.fate`` has what
is to happen to it, one of :data:`FATES`, with a space and the number of committed rounds from which on.
"""

import json
import os
import signal
import socket
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch._dynamo  # optimizers need it, which takes seconds: once for both ranks
from managers import manager_of, run_child
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import hvd_compress
from hvd_compress.engine.hashes import hash_of
from hvd_compress.engine.shards import local

#: ``exchange``: it kills itself in an exchange. Once, in an exchange: ``stop``: it stands still; ``cut``: its
#: connections to the other groups are closed. ``unsure``: they are when it has all averages. ``unhealed``: the first
#: state of another group does not arrive.
FATES = ("exchange", "stop", "cut", "unsure", "unhealed")
RANKS = 2
DEFAULTS = {"rounds": 10**6, "period": 2, "timeout": 5.0, "recipe": "low_bit", "pause": 0.1, "loads": ""}


class Training:
    def __init__(self, folder, name, rank, port, lighthouse, settings):
        torch.set_num_threads(1)
        self.rank, self.settings, self.path = rank, settings, Path(folder, f"{name}-{rank}")
        distributed.init_process_group("gloo", init_method=f"tcp://localhost:{port}", rank=rank, world_size=RANKS)
        mesh = init_device_mesh("cpu", (RANKS,))
        torch.manual_seed(int.from_bytes(name.encode(), "big") % 2**31)  # others in each group
        self.model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 5))
        for layer in (self.model[2], self.model):
            fully_shard(layer, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        seconds = timedelta(seconds=settings["timeout"])
        where = {"rank": rank, "world_size": RANKS, "replica_id": name, "lighthouse_addr": lighthouse}
        self.manager = manager_of(self, seconds, min_replica_size=1, store_port=port, **where)
        recipe = getattr(hvd_compress.recipes, settings["recipe"])
        self.local = recipe(self.model, self.optimizer, settings["period"], process_group=self.manager)
        self.collectives = self.local.compression.collectives
        self.start, self.collectives.start = self.collectives.start, self.started
        transport = self.manager._checkpoint_transport
        self.receive, transport.recv_checkpoint = transport.recv_checkpoint, self.received
        self.data = torch.Generator().manual_seed(torch.initial_seed() + rank)
        self.losses, self.taken_back = [], 0.0

    def save(self):
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load(self, state):
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def say(self, event):
        weights = self.local._rounds._common.weights
        found = {
            "event": event,
            "step": self.manager.current_step(),
            "hash": hash_of(weight.common for weight in weights),
            "same": all(torch.equal(weight.own, weight.common) for weight in weights),
            "moments": hash_of(
                local(value).float() for state in self.optimizer.state.values() for value in state.values()
            ),
            "groups": self.collectives.size,
            "loss": sum(self.losses) / max(1, len(self.losses)),
            "at": round(time.time(), 3),
        }
        self.losses.clear()
        print(json.dumps(found), flush=True)

    def run(self):
        if loads := self.settings["loads"]:
            own, manager, local_steps = torch.load(self.path.with_name(f"{loads}-{self.rank}.pt"), weights_only=False)
            self.load(own)
            self.manager.load_state_dict(manager)
            self.local.load_state_dict(local_steps)
        self.local.join()
        self.say("joined")
        while self.manager.current_step() < self.settings["rounds"]:
            self.train()
        torch.save((self.save(), self.manager.state_dict(), self.local.state_dict()), self.path.with_suffix(".pt"))
        self.say("end")

    def train(self):
        x = torch.randn(8, 16, generator=self.data)
        self.optimizer.zero_grad()
        loss = (self.model(x) - x[:, :5].sin()).square().mean()
        loss.backward()
        self.losses.append(loss.item())
        self.optimizer.step()
        time.sleep(self.settings["pause"])
        if self.local.step():
            self.say("round")
        taken_back = self.local.compression.stats()["rounds_taken_back"]
        if taken_back > self.taken_back:
            self.say("taken back")
        self.taken_back = taken_back

    def started(self, request, name):
        for point in ("exchange", "stop", "cut") if name else ("unsure",):
            self.at(point)
        return self.start(request, name)

    def received(self, **where):
        state = self.receive(**where)
        self.at("unhealed")
        return state

    def at(self, point):
        """What is to happen here, if anything."""
        fate = self.path.with_suffix(".fate")
        try:
            wanted, step = fate.read_text().split()
        except FileNotFoundError:
            return
        if wanted != point or self.manager.current_step() < int(step):
            return
        if point == "exchange":
            os.kill(os.getpid(), signal.SIGKILL)
        fate.unlink()
        if point == "unhealed":
            raise ConnectionError("the state has not arrived")
        if point == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        else:
            self.manager._pg.abort()


def main():
    folder, name, lighthouse, settings = sys.argv[1:]
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    children, given = [], {**DEFAULTS, **json.loads(settings)}
    for rank in range(RANKS):
        child = os.fork()
        if child == 0:
            run_child(
                Path(folder, f"{name}-{rank}"),
                lambda rank=rank: Training(folder, name, rank, port, lighthouse, given).run(),
            )
        children.append(child)
    print(*children, flush=True)
    signal.signal(signal.SIGTERM, lambda *_: end(children))
    codes = []
    while children:
        child, status = os.wait()
        children.remove(child)
        codes.append(os.waitstatus_to_exitcode(status))
        if status:
            end(children)
    sys.exit(any(codes))


def end(children):
    for child in children:
        os.kill(child, signal.SIGKILL)


if __name__ == "__main__":
    main()
