"""Horovod, SGD with momentum, IWP at density 1/64.

    horovodrun --gloo -np 2 python examples/horovod_sgd.py --steps 200 --checkpoints /tmp/horovod_sgd

By MPI: ``bash scripts/run.sh 2 examples/horovod_sgd.py ...``; with Open MPI 5, horovodrun needs ``--gloo``.
Every rank saves its own checkpoint at the end. If the folder has checkpoints, training resumes from them, bit-exactly.
"""

import argparse
from pathlib import Path

import horovod.torch as hvd
import torch
from torch import nn

import hvd_compress


def batch(seed: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """64 random points and their classes: which of the first ten numbers is the largest."""
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(seed))
    return x.to(device), x[:, :10].argmax(1).to(device)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--checkpoints", type=Path, required=True)
    options = parser.parse_args()

    hvd.init()
    rank, ranks = hvd.rank(), hvd.size()
    device = torch.device("cuda", hvd.local_rank()) if torch.cuda.is_available() else torch.device("cpu")

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 10)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    compression = hvd_compress.IWP(model.named_parameters(), density=1 / 64)
    compression.take_momentum(optimizer)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), compression=compression)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)

    first, file = 0, options.checkpoints / f"rank-{rank}.pt"
    if file.exists():
        saved = torch.load(file, weights_only=True)
        first = saved["step"]
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        compression.load_state_dict(saved["compression"])

    for step in range(first, options.steps):
        x, y = batch(step * ranks + rank, device)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    options.checkpoints.mkdir(parents=True, exist_ok=True)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "compression": compression.state_dict()}
    torch.save({"step": options.steps, **state}, file)

    with torch.no_grad():
        x, y = batch(10**6, device)
        loss = nn.functional.cross_entropy(model(x), y)
    ratio = compression.stats()["total"]["wire_ratio"]
    print(f"rank {rank}: {options.steps} steps from {first}, loss {loss:.8f}, {ratio:.1f} times fewer bytes")


if __name__ == "__main__":
    main()
