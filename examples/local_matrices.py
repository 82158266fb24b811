"""For many ranks: local steps of the hidden matrices by torch.optim.Muon; the others' gradients averaged in each step.

    torchrun --nproc-per-node 2 examples/local_matrices.py --steps 200 --checkpoints /tmp/local_matrices

With 16 and more ranks this loses less than local steps of all parameters (docs/local_steps.md), at the learning rate of
dense training. Every rank saves its own checkpoint at the end. If the folder has checkpoints, training resumes from
them, bit-exactly.
"""

import argparse
import os
from pathlib import Path

import torch
from torch import distributed, nn

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

    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    distributed.init_process_group("nccl" if cuda else "gloo")
    rank, ranks = distributed.get_rank(), distributed.get_world_size()

    torch.manual_seed(0)  # equal weights on all ranks
    model = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)).to(device)
    matrices, others = hvd_compress.hidden_matrices(model)
    muon = torch.optim.Muon(matrices.values(), lr=3e-3, adjust_lr_fn="match_rms_adamw")  # learning rates as AdamW's
    adamw = torch.optim.AdamW(others.values(), lr=3e-3)
    local = hvd_compress.recipes.low_bit(matrices.items(), muon, period=3)
    averaged = hvd_compress.Quantized(others.items(), bits=8)

    parts = {"model": model, "muon": muon, "adamw": adamw, "local": local, "averaged": averaged}
    first, file = 0, options.checkpoints / f"rank-{rank}.pt"  # between exchanges the weights differ: one of every rank
    if file.exists():
        first, states = torch.load(file, weights_only=True)
        for name, part in parts.items():
            part.load_state_dict(states[name])

    for step in range(first, options.steps):
        x, y = batch(step * ranks + rank, device)
        model.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        hvd_compress.average_gradients(averaged)
        nn.utils.clip_grad_norm_(others.values(), 1.0)  # not with the matrices': their gradients are each rank's own
        for part in (muon, adamw, local):
            part.step()

    options.checkpoints.mkdir(parents=True, exist_ok=True)
    torch.save((options.steps, {name: part.state_dict() for name, part in parts.items()}), file)

    totals = [compression.stats()["total"] for compression in (local.compression, averaged)]
    ratio = sum(t["dense_bytes"] for t in totals) / sum(t["wire_bytes"] for t in totals)
    local.finish(model)  # the average of all ranks, for testing
    with torch.no_grad():
        x, y = batch(10**6, device)
        loss = nn.functional.cross_entropy(model(x), y)
    print(f"rank {rank}: {options.steps} steps from {first}, loss {loss:.8f}, {ratio:.1f} times fewer bytes")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
