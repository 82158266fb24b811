"""Elastic training with momentum correction. Started by tests/faults/test_elastic_job.py under horovodrun:

elastic_job.py STEPS. Every worker reports its steps; every ten steps the replicas must be equal."""

import os
import sys
import time

import horovod.torch as hvd
import torch

import hvd_compress

STEPS = int(sys.argv[1])


def say(text: str) -> None:
    sys.stdout.write(f"[{os.environ['HOROVOD_HOSTNAME']}] process {os.getpid()} {text}\n")
    sys.stdout.flush()


@hvd.elastic.run
def train(state: hvd.elastic.TorchState) -> None:
    state.optimizer.zero_grad()  # what a lost step has left; the residual contains it
    while state.step < STEPS:
        x = torch.randn(16, 32)
        torch.nn.functional.mse_loss(state.model(x), x[:, :8].sin()).backward()
        state.optimizer.step()
        state.optimizer.zero_grad()
        state.step += 1
        say(f"step {state.step} of {hvd.size()} ranks")
        if state.step % 10 == 0:
            mine = torch.cat([p.detach().flatten() for p in state.model.parameters()])[None]
            everyone = hvd.allgather(mine, name="check")
            assert mine.isfinite().all() and all(torch.equal(mine[0], other) for other in everyone), "replicas differ"
            state.commit()
        time.sleep(0.02)


def main() -> None:
    torch.set_num_threads(1)
    hvd.init()
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64), torch.nn.Linear(64, 8)
    )
    plain = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    compression = hvd_compress.IWP(model.named_parameters(), density=1 / 16, start_timeout=60.0)
    assert compression.take_momentum(plain) == 0.9 and plain.param_groups[0]["momentum"] == 0.0
    optimizer = hvd.DistributedOptimizer(plain, named_parameters=model.named_parameters(), compression=compression)
    train(hvd.elastic.TorchState(model=model, optimizer=optimizer, step=0))
    say(f"ends after {STEPS} steps with {hvd.size()} ranks")


if __name__ == "__main__":
    main()
