"""Elastic Horovod: ranks may come and go. The compressor notices by itself; TorchState needs nothing of it.

    horovodrun --gloo --network-interfaces lo -np 2 --min-np 1 --host-discovery-script ./hosts.sh \\
        python examples/horovod_elastic.py --steps 500 --checkpoints /tmp/elastic

``./hosts.sh`` prints a line ``HOST:SLOTS`` for each host that is there now, such as ``localhost:2``; with more than one
host, leave ``--network-interfaces lo`` out. ``state.commit()`` keeps the progress when a rank fails. At the end every
rank saves its state; a new job of any number of ranks reshards these states.
"""

import argparse
from pathlib import Path

import horovod.torch as hvd
import torch
from torch import nn

import hvd_compress


def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """64 random points and their classes: which of the first ten numbers is the largest."""
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(seed))
    return x, x[:, :10].argmax(1)


@hvd.elastic.run
def train(state: hvd.elastic.TorchState, steps: int) -> None:
    state.optimizer.zero_grad()  # of a step that was lost; the residual contains it
    while state.step < steps:
        x, y = batch(state.step * 1000 + hvd.rank())
        nn.functional.cross_entropy(state.model(x), y).backward()
        state.optimizer.step()
        state.optimizer.zero_grad()
        state.step += 1
        if state.step % 10 == 0:
            state.commit()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--checkpoints", type=Path, required=True)
    options = parser.parse_args()
    hvd.init()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    compression = hvd_compress.IWP(model.named_parameters(), density=1 / 64)
    compression.take_momentum(optimizer)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), compression=compression)

    first, folders = 0, sorted(options.checkpoints.glob("step-*"))
    if folders:
        saved = [torch.load(file, weights_only=True) for file in sorted(folders[-1].glob("rank-*.pt"))]
        first = saved[0]["step"]
        model.load_state_dict(saved[0]["model"])
        optimizer.load_state_dict(saved[0]["optimizer"])
        compression.load_state_dict(hvd_compress.reshard(rank["compression"] for rank in saved))
    train(hvd.elastic.TorchState(model=model, optimizer=optimizer, step=first), options.steps)

    folder = options.checkpoints / f"step-{options.steps:09}"
    folder.mkdir(parents=True, exist_ok=True)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "compression": compression.state_dict()}
    torch.save({"step": options.steps, **state}, folder / f"rank-{hvd.rank():03}.pt")

    x, y = batch(10**6)
    loss, ratio = nn.functional.cross_entropy(model(x), y), compression.stats()["total"]["wire_ratio"]
    print(f"rank {hvd.rank()}: {options.steps} steps from {first}, loss {loss:.8f}, {ratio:.1f} times fewer bytes")


if __name__ == "__main__":
    main()
