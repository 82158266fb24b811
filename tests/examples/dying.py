"""Runs elastic_local_steps in this rank, writes down what it does, and dies: dying.py FOLDER SCRIPT ARGUMENTS...

The rank with ``DIES`` in its environment kills itself by SIGKILL in local step :data:`STEPS`; when the job has gone on,
once more, and its torchrun before, as a machine that is lost. ``FOLDER/log.jsonl`` has a line of JSON for each
checkpoint, and for each state that was loaded; ``FOLDER/*.pt`` the residuals at both.
"""

import importlib.util
import json
import os
import signal
import sys
from pathlib import Path

import torch
from torch import distributed

import hvd_compress
from hvd_compress.engine.hashes import hash_of

#: Local steps of the first start, and of the second, after which it dies.
STEPS = (30, 20)

folder, script = Path(sys.argv[1]), sys.argv[2]
sys.argv = sys.argv[2:]
spec = importlib.util.spec_from_file_location("example", script)
example = importlib.util.module_from_spec(spec)
spec.loader.exec_module(example)

fates = [folder / "rank lost", folder / "machine lost"]
fate = next((number for number, file in enumerate(fates) if not file.exists()), None) if "DIES" in os.environ else None
taken = 0


def tell(event, local, **more):
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    state = local.state_dict()
    found = {"event": event, "step": state["local_steps"]["steps"], "rank": rank, "ranks": ranks, **more}
    torch.save(state["owed"]["residual"], folder / f"{event}-{found['step']}-{ranks}-{rank}.pt")
    with (folder / "log.jsonl").open("a") as log:
        log.write(f"{json.dumps(found)}\n")


class Steps(hvd_compress.LocalSteps):
    def step(self):
        global taken
        if not taken and self.compression.step:
            tell("loaded", self)
        ended, taken = super().step(), taken + 1
        if fate is not None and taken == STEPS[fate]:
            fates[fate].touch()
            if fate == 1:
                os.kill(os.getppid(), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
        return ended

    def finish(self, model):
        super().finish(model)
        x, y = example.batch(10**6, torch.device("cpu"))
        loss = torch.nn.functional.cross_entropy(model(x), y).item()
        tell("saved", self, loss=loss, weights=hash_of(p.detach() for p in model.parameters()))


hvd_compress.recipes.LocalSteps = Steps
example.main()
