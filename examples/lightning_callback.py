"""Lightning: a callback that compresses the gradients of any LightningModule.

    torchrun --nproc-per-node 2 examples/lightning_callback.py --steps 240 --checkpoints /tmp/lightning

Local steps in its place: ``LightningCallback(hvd_compress.recipes.low_bit, period=3)``.
"""

import argparse
from pathlib import Path

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hvd_compress


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 10))

    def training_step(self, batch, number):
        return nn.functional.cross_entropy(self.layers(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.2)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=240, help="a multiple of the 12 of an epoch on 2 ranks")
    parser.add_argument("--checkpoints", type=Path, required=True)
    options = parser.parse_args()
    file = options.checkpoints / "last.ckpt"
    lightning.seed_everything(0)
    x = torch.randn(1536, 128)
    batches, module = DataLoader(TensorDataset(x, x[:, :10].argmax(1)), batch_size=64), Classifier()
    callback = hvd_compress.trainers.LightningCallback(hvd_compress.IWP, density=1 / 64)
    devices = "auto" if torch.cuda.is_available() else 2
    trainer = lightning.Trainer(
        strategy="ddp", devices=devices, max_epochs=options.steps // 12, callbacks=[callback], logger=False,
        default_root_dir=options.checkpoints, enable_progress_bar=False, enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(module, batches, ckpt_path=str(file) if file.exists() else None, weights_only=True)
    trainer.save_checkpoint(file)
    loss = nn.functional.cross_entropy(module.layers(x[:64]), x[:64, :10].argmax(1))
    ratio = callback.compression.stats()["total"]["wire_ratio"]
    print(f"rank {trainer.global_rank}: {trainer.global_step} steps, loss {loss:.8f}, {ratio:.1f} times fewer bytes")


if __name__ == "__main__":
    main()
