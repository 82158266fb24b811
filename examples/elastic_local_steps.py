"""Local steps under torchrun's elastic restarts: a rank dies, and the job goes on from its newest checkpoint.

    torchrun --nproc-per-node 2 --max-restarts 3 examples/elastic_local_steps.py --steps 240 --checkpoints /tmp/elastic

If a rank dies, torchrun ends the others and starts all of them again. On several machines, with ``--nnodes 1:4
--rdzv-backend c10d --rdzv-endpoint HOST:29500`` and a folder that all of them see, it goes on with those that are left.
Set ``TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1`` for torchrun, or new ranks may try to connect to those that have died. A
checkpoint is saved every ``--save-every`` local steps, also in the middle of a period, and fits any number of ranks.
"""

import argparse
import os
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import distributed, nn

import hvd_compress


def batch(seed: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """64 random points and their classes: which of the first ten numbers is the largest."""
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(seed))
    return x.to(device), x[:, :10].argmax(1).to(device)


def newest(folder: Path) -> Path | None:
    """The newest complete checkpoint, the same on all ranks. DCP writes ``.metadata`` when all ranks have written."""
    found = sorted(folder.glob("step-*/.metadata"))
    chosen = [found[-1].parent if found else None]
    distributed.broadcast_object_list(chosen)
    return chosen[0]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--save-every", type=int, default=12)
    parser.add_argument("--checkpoints", type=Path, required=True)
    options = parser.parse_args()

    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    distributed.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(minutes=5))
    rank, ranks = distributed.get_rank(), distributed.get_world_size()

    torch.manual_seed(0)  # equal weights on all ranks
    model = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 10)).to(device)
    adamw = torch.optim.AdamW(model.parameters(), lr=3e-3)
    local = hvd_compress.recipes.low_bit(model, adamw, period=5)
    x, y = batch(10**6, device)  # for testing

    first, folder = 0, newest(options.checkpoints)
    if folder is not None:
        saved = {"step": 0, "ranks": 0}
        dcp.load(saved, checkpoint_id=folder)
        first, old = saved["step"], saved["ranks"]
        dcp.load({"model": model, "local": hvd_compress.DCPState(local, saved_on=(old,))}, checkpoint_id=folder)
        adamw.load_state_dict(torch.load(folder / f"adamw-{rank % old}.pt", weights_only=True))

    for step in range(first + 1, options.steps + 1):
        inputs, classes = batch(step * 1000 + rank, device)
        model.zero_grad()
        nn.functional.cross_entropy(model(inputs), classes).backward()
        adamw.step()
        local.step()
        if step % options.save_every == 0 or step == options.steps:
            local.finish(model)  # all ranks have one model now, as DCP needs
            folder = options.checkpoints / f"step-{step:09}"
            folder.mkdir(parents=True, exist_ok=True)
            torch.save(adamw.state_dict(), folder / f"adamw-{rank}.pt")  # each rank's own moments
            state = {"step": step, "ranks": ranks, "model": model, "local": hvd_compress.DCPState(local)}
            dcp.save(state, checkpoint_id=folder)

    with torch.no_grad():
        loss = nn.functional.cross_entropy(model(x), y)
    ratio = local.compression.stats()["total"]["wire_ratio"]
    print(f"rank {rank}: {options.steps} steps from {first}, loss {loss:.8f}, {ratio:.1f} times fewer bytes")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
