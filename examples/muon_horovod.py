"""Horovod, torch.optim.Muon for hidden matrices and AdamW for the rest: each optimizer has a compressor of its own.

    horovodrun --gloo -np 2 python examples/muon_horovod.py --steps 200 --checkpoints /tmp/muon_horovod

All entries are sent, in 3 bits: Muon uses every direction of the average. Every rank saves its own checkpoint at the
end. If the folder has checkpoints, training resumes from them, bit-exactly.
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
    model = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)).to(device)
    matrices, others = hvd_compress.hidden_matrices(model)
    muon = torch.optim.Muon(matrices.values(), lr=3e-3, adjust_lr_fn="match_rms_adamw")  # learning rates as AdamW's
    adamw = torch.optim.AdamW(others.values(), lr=3e-3)
    optimizers, compressors = [], []
    for optimizer, parameters in ((muon, matrices), (adamw, others)):
        compressors.append(hvd_compress.Quantized(parameters.items(), bits=3))
        optimizers.append(hvd.DistributedOptimizer(optimizer, parameters.items(), compression=compressors[-1]))
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)

    parts = [model, *optimizers, *compressors]
    first, file = 0, options.checkpoints / f"rank-{rank}.pt"
    if file.exists():
        first, *states = torch.load(file, weights_only=True)
        for part, state in zip(parts, states, strict=True):
            part.load_state_dict(state)

    for step in range(first, options.steps):
        x, y = batch(step * ranks + rank, device)
        model.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        for optimizer in optimizers:
            optimizer.step()

    options.checkpoints.mkdir(parents=True, exist_ok=True)
    torch.save((options.steps, *(part.state_dict() for part in parts)), file)

    with torch.no_grad():
        x, y = batch(10**6, device)
        loss = nn.functional.cross_entropy(model(x), y)
    totals = [compression.stats()["total"] for compression in compressors]
    ratio = sum(total["dense_bytes"] for total in totals) / sum(total["wire_bytes"] for total in totals)
    print(f"rank {rank}: {options.steps} steps from {first}, loss {loss:.8f}, {ratio:.1f} times fewer bytes")


if __name__ == "__main__":
    main()
