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


def load(folder: Path, model: nn.Module, adamw: torch.optim.Optimizer, local: hvd_compress.LocalSteps) -> int:
    """Loads the newest checkpoint that all ranks can read, and returns its step; 0 if there is none."""
    found = [sorted((file.parent for file in folder.glob("step-*/.metadata")), reverse=True)]
    distributed.broadcast_object_list(found)
    for path in found[0]:  # as rank 0 sees them; DCP writes .metadata when all ranks have written
        saved, errors = {"step": 0, "ranks": 0}, [""] * distributed.get_world_size()
        try:  # each rank's own file last: if DCP fails, it fails on all ranks
            dcp.load(saved, checkpoint_id=path)
            old = saved["ranks"]
            dcp.load({"model": model, "local": hvd_compress.DCPState(local, saved_on=(old,))}, checkpoint_id=path)
            adamw.load_state_dict(torch.load(path / f"adamw-{distributed.get_rank() % old}.pt", weights_only=True))
        except (Exception, dcp.CheckpointException) as error:  # the latter is no Exception
            errors[0] = f"{error!r:.300}"
        distributed.all_gather_object(errors, errors[0])
        if not any(errors):
            return saved["step"]
        print(f"{path} cannot be read: {max(errors)}")
    if found[0]:
        raise RuntimeError(f"no checkpoint in {folder} can be read")
    return 0


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--save-every", type=int, default=12)
    parser.add_argument("--checkpoints", type=Path, required=True)
    options = parser.parse_args()

    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    distributed.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timedelta(minutes=5))
    rank, ranks = distributed.get_rank(), distributed.get_world_size()

    torch.manual_seed(0)  # equal weights on all ranks
    model = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 10)).to(device)
    adamw = torch.optim.AdamW(model.parameters(), lr=3e-3)
    local = hvd_compress.recipes.low_bit(model, adamw, period=5)
    x, y = batch(10**6, device)  # for testing

    first = load(options.checkpoints, model, adamw, local)
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

    loss = nn.functional.cross_entropy(model(x), y).item()
    ratio = local.compression.stats()["total"]["wire_ratio"]
    print(f"rank {rank}: {options.steps} steps from {first}, loss {loss:.8f}, {ratio:.1f} times fewer bytes")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
