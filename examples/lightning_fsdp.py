"""Lightning's ModelParallelStrategy: a module sharded by FSDP2 inside nodes, its shards compressed between them (HSDP).

    torchrun --nproc-per-node 4 examples/lightning_fsdp.py --steps 200 --checkpoints /tmp/lightning_fsdp

Two nodes of two ranks, on one machine. Lightning's checkpoint gets the states of all ranks.
"""

import argparse
import os
from pathlib import Path

import lightning
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import distributed, nn
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

    def on_fit_start(self):
        group = self.mesh.get_group("replicate")
        self.compression = hvd_compress.IWP(self.layers, density=1 / 64, process_group=group)
        hvd_compress.register_fsdp_hooks(self.layers, self.compression)

    def on_load_checkpoint(self, checkpoint):  # this strategy loads it after on_fit_start
        self.compression.load_state_dict(checkpoint["hvd_compress"][self.global_rank])

    def on_save_checkpoint(self, checkpoint):
        checkpoint["hvd_compress"] = [None] * self.trainer.world_size
        distributed.all_gather_object(checkpoint["hvd_compress"], self.compression.state_dict())

    def training_step(self, batch, number):
        return nn.functional.cross_entropy(self.layers(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.layers.parameters(), lr=0.2)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200, help="a multiple of the 5 of an epoch on 4 ranks")
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--checkpoints", type=Path, required=True)
    options = parser.parse_args()
    file = options.checkpoints / "last.ckpt"
    lightning.seed_everything(0)
    x = torch.randn(1280, 128)
    batches, module = DataLoader(TensorDataset(x, x[:, :10].argmax(1)), batch_size=64), Classifier(options.nodes)
    devices = "auto" if torch.cuda.is_available() else 4
    strategy = ModelParallelStrategy(data_parallel_size=int(os.environ["WORLD_SIZE"]), tensor_parallel_size=1)
    trainer = lightning.Trainer(
        strategy=strategy, devices=devices, max_epochs=options.steps // 5, logger=False,
        default_root_dir=options.checkpoints, enable_progress_bar=False, enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(module, batches, ckpt_path=str(file) if file.exists() else None, weights_only=True)
    trainer.save_checkpoint(file)
    loss = nn.functional.cross_entropy(module.layers(x[:64]), x[:64, :10].argmax(1))
    ratio = module.compression.stats()["total"]["wire_ratio"]
    print(f"rank {trainer.global_rank}: {trainer.global_step} steps, loss {loss:.8f}, {ratio:.1f} times fewer bytes")


if __name__ == "__main__":
    main()
