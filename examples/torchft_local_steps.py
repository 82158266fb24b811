"""Machines that come and go: local steps of AdamW on a torchft Manager, rounds in 2 bits (on CPUs).

    TORCHFT_LIGHTHOUSE=http://localhost:29510 torchrun --nproc-per-node 1 --master-port 29511 \
        examples/torchft_local_steps.py --steps 600 --checkpoints /tmp/torchft_local_steps

That is one peer. Start torchft_lighthouse --min_replicas 2 --join_timeout_ms 10000 first, then the command once for
each peer, each on one machine with a port of its own. Kill a peer and start it again: it takes the weights of the
others. If all are gone, they resume from the checkpoint, which any peer may load.
"""

import argparse
import os
from datetime import timedelta
from pathlib import Path

import torch
import torchft
from torch import nn

import hvd_compress

PERIOD = 30


def batch(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """64 random points and their classes: which of the first ten numbers is the largest."""
    x = torch.randn(64, 128, generator=generator)
    return x, x[:, :10].argmax(1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--checkpoints", type=Path, required=True)
    options = parser.parse_args()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 10))
    adamw = torch.optim.AdamW(model.parameters(), lr=3e-3)
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=30)),
        load_state_dict=lambda state: (model.load_state_dict(state["model"]), adamw.load_state_dict(state["adamw"])),
        state_dict=lambda: {"model": model.state_dict(), "adamw": adamw.state_dict()},
        min_replica_size=2,
        use_async_quorum=False,
        quorum_timeout=timedelta(seconds=60),
        quorum_retries=120,
        connect_timeout=timedelta(seconds=5),
    )
    local = hvd_compress.recipes.low_bit(model, adamw, period=PERIOD, process_group=manager)

    parts, file = {"model": model, "adamw": adamw, "manager": manager, "local": local}, options.checkpoints / "peer.pt"
    if file.exists():
        states = torch.load(file, weights_only=True)
        for name, part in parts.items():
            part.load_state_dict(states[name])
    local.join()  # waits for a round of the others, and returns with their weights
    first = manager.current_step()

    data = torch.Generator().manual_seed(os.getpid() + first)  # each peer has its own
    while manager.current_step() * PERIOD < options.steps:
        x, y = batch(data)
        adamw.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        adamw.step()
        local.step()  # every 30th call is a round

    options.checkpoints.mkdir(parents=True, exist_ok=True)
    states = {name: part.state_dict() for name, part in parts.items()}
    unfinished = file.with_suffix(f".{os.getpid()}")  # several peers may share a folder
    torch.save(states, unfinished)
    unfinished.replace(file)
    with torch.no_grad():
        x, y = batch(torch.Generator().manual_seed(10**6))
        loss = nn.functional.cross_entropy(model(x), y)
    stats = local.compression.stats()
    rounds = f"rounds {first} to {manager.current_step()} with {stats['peers']:.0f} peers"
    print(f"{rounds}, loss {loss:.8f}, {stats['total']['wire_ratio']:.1f} times fewer bytes")
    manager.shutdown()


if __name__ == "__main__":
    main()
