"""Trains until something happens to a rank. Started by tests/faults/test_lost_ranks.py under scripts/run.sh:

victim.py [--host ddp] [--method M] [--fail-at N]

Every rank reports its process and each step. ``--fail-at``: the last rank raises an exception in the middle of the
backward pass of step N. After half of the steps replicas must be equal: a launcher that ends a job loses last lines.
"""

import argparse
import importlib
import itertools
import os
import sys
from pathlib import Path

tests = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(tests), str(tests / "parallel")]

arguments = argparse.ArgumentParser()
arguments.add_argument("--host", choices=["horovod", "ddp"], default="horovod")
arguments.add_argument("--method", default="iwp")
arguments.add_argument("--fail-at", type=int)


def main() -> None:
    import job
    import torch

    chosen = arguments.parse_args()
    torch.set_num_threads(1)
    host, job.method = importlib.import_module(f"{chosen.host}_job"), chosen.method
    job.host = host
    host.start()
    trained = job.Job()

    def say(text: str) -> None:
        sys.stdout.write(f"[rank {host.rank()}] process {os.getpid()} {text}\n")
        sys.stdout.flush()

    def fail(_: torch.Tensor) -> None:
        raise ArithmeticError("seeded by the test")

    for step in itertools.count():
        say(f"step {step}")
        if chosen.fail_at and step == chosen.fail_at // 2:
            trained.assert_equal_replicas()
            say("has equal replicas")
        if step == chosen.fail_at and host.rank() == host.size() - 1:
            trained.model.branches[0].weight.register_hook(fail)
        trained.step(step)


if __name__ == "__main__":
    main()
