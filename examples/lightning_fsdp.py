"""Lightning's ModelParallelStrategy: a module sharded by FSDP2 inside nodes, with local steps between them.

    torchrun --nproc-per-node 4 examples/lightning_fsdp.py --steps 240 --checkpoints /tmp/lightning_fsdp

Two nodes of two ranks, on one machine. Compressed gradients in their place: ``build`` returns a compressor.
"""

import argparse
import os
from pathlib import Path

import lightning
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

import hvd_compress


class Classifier(lightning.LightningModule):
    """``nodes``: how many, each of equally many ranks."""

    def __init__(self, nodes):
        super().__init__()
        self.nodes = nodes
        self.layers = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 10))

    def configure_model(self):
        shape = self.nodes, self.trainer.world_size // self.nodes
        self.mesh = init_device_mesh(self.device.type, shape, mesh_dim_names=("replicate", "shard"))
        fully_shard(self.layers[0], mesh=self.mesh["shard"])
        fully_shard(self.layers, mesh=self.mesh["shard"])

    def training_step(self, batch, number):
        return nn.functional.cross_entropy(self.layers(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.layers.parameters(), lr=3e-3)


def build(module, optimizers):
    """Nodes exchange the progress of their shards in 2 bits."""
    return hvd_compress.recipes.low_bit(module, optimizers, period=3, process_group=module.mesh.get_group("replicate"))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=240, help="a multiple of the 6 of an epoch on 4 ranks")
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--checkpoints", type=Path, required=True)
    options = parser.parse_args()
    file = options.checkpoints / "last.ckpt"
    lightning.seed_everything(0)
    x = torch.randn(1536, 128)
    batches, module = DataLoader(TensorDataset(x, x[:, :10].argmax(1)), batch_size=64), Classifier(options.nodes)
    callback = hvd_compress.trainers.LightningCallback(build)
    devices = "auto" if torch.cuda.is_available() else 4
    strategy = ModelParallelStrategy(data_parallel_size=int(os.environ["WORLD_SIZE"]), tensor_parallel_size=1)
    trainer = lightning.Trainer(
        strategy=strategy, devices=devices, max_epochs=options.steps // 6, callbacks=[callback], logger=False,
        default_root_dir=options.checkpoints, enable_progress_bar=False, enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(module, batches, ckpt_path=str(file) if file.exists() else None, weights_only=True)
    trainer.save_checkpoint(file)
    loss = nn.functional.cross_entropy(module.layers(x[:64]), x[:64, :10].argmax(1))
    ratio = callback.compression.stats()["total"]["wire_ratio"]
    print(f"rank {trainer.global_rank}: {trainer.global_step} steps, loss {loss:.8f}, {ratio:.1f} times fewer bytes")


if __name__ == "__main__":
    main()
