"""Hugging Face Accelerate: register the hook on the prepared model, and save each rank's state beside Accelerate's.

    torchrun --nproc-per-node 2 examples/accelerate_loop.py --steps 200 --checkpoints /tmp/accelerate

On a machine without a GPU, ``accelerate launch --num_processes 2`` starts one process only: use torchrun there.
``accelerator.register_for_checkpointing(compression)`` would save the state of rank 0 only, which other ranks refuse.
"""

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hvd_compress


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--checkpoints", type=Path, required=True)
    options = parser.parse_args()

    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    torch.manual_seed(0)
    x = torch.randn(2560, 128)
    model = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    batches = DataLoader(TensorDataset(x, x[:, :10].argmax(1)), batch_size=64)
    model, optimizer, batches = accelerator.prepare(model, optimizer, batches)

    compression = hvd_compress.IWP(model.module.named_parameters(), density=1 / 64)
    model.register_comm_hook(compression, hvd_compress.ddp_hook)
    rank = accelerator.process_index

    def save(models, weights, folder):
        torch.save((step, compression.state_dict()), Path(folder, f"compression-{rank}.pt"))

    def load(models, folder):
        nonlocal step
        step, state = torch.load(Path(folder, f"compression-{rank}.pt"), weights_only=True)
        compression.load_state_dict(state)

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)

    step = 0
    if options.checkpoints.exists():
        accelerator.load_state(str(options.checkpoints))
    first = step
    while step < options.steps:
        for inputs, targets in accelerator.skip_first_batches(batches, step % len(batches)):
            optimizer.zero_grad()
            accelerator.backward(nn.functional.cross_entropy(model(inputs), targets))
            optimizer.step()
            step += 1
            if step % 50 == 0:
                accelerator.log(compression.metrics(), step)
            if step == options.steps:
                break
    accelerator.wait_for_everyone()  # another rank may still be loading what this one overwrites
    accelerator.save_state(str(options.checkpoints))

    x = x[:64].to(accelerator.device)
    with torch.no_grad():
        loss = nn.functional.cross_entropy(model.module(x), x[:, :10].argmax(1))
    ratio = compression.stats()["total"]["wire_ratio"]
    print(f"rank {rank}: {step} steps from {first}, loss {loss:.8f}, {ratio:.1f} times fewer bytes")
    accelerator.end_training()


if __name__ == "__main__":
    main()
