"""Hugging Face Accelerate: local steps of AdamW in a loop with ``accelerator.prepare``.

    torchrun --nproc-per-node 2 examples/accelerate_loop.py --steps 200 --checkpoints /tmp/accelerate

On a machine without a GPU, ``accelerate launch --num_processes 2`` starts one process only: use torchrun there.
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
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    batches = DataLoader(TensorDataset(x, x[:, :10].argmax(1)), batch_size=64)
    model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
    loop = hvd_compress.trainers.AccelerateLoop(hvd_compress.recipes.low_bit, accelerator, model, optimizer, period=3)

    step = 0
    if options.checkpoints.exists():
        accelerator.load_state(str(options.checkpoints))
        step = int((options.checkpoints / "step").read_text())
    first = step
    while step < options.steps:
        for inputs, targets in accelerator.skip_first_batches(batches, step % len(batches)):
            optimizer.zero_grad()
            accelerator.backward(nn.functional.cross_entropy(model(inputs), targets))
            optimizer.step()
            loop.step()
            step += 1
            if step % 50 == 0:
                accelerator.log(loop.metrics(), step)
            if step == options.steps:
                break
    accelerator.wait_for_everyone()  # another rank may still be loading what this one overwrites
    accelerator.save_state(str(options.checkpoints))
    if accelerator.is_main_process:
        (options.checkpoints / "step").write_text(str(step))
    ratio = loop.compression.stats()["total"]["wire_ratio"]
    loop.end()  # the average of all ranks, for testing

    x = x[:64].to(accelerator.device)
    with torch.no_grad():
        loss = nn.functional.cross_entropy(model.module(x), x[:, :10].argmax(1))
    rank = accelerator.process_index
    print(f"rank {rank}: {step} steps from {first}, loss {loss:.8f}, {ratio:.1f} times fewer bytes")
    accelerator.end_training()


if __name__ == "__main__":
    main()
