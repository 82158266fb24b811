"""Lightning: a callback that compresses the gradients of any LightningModule.

    torchrun --nproc-per-node 2 examples/lightning_callback.py --steps 200 --checkpoints /tmp/lightning

``DDPStrategy(ddp_comm_state=..., ddp_comm_hook=...)`` does not fit: a compressor is built after the process group and
with the model on its device, a strategy before; and Lightning registers its hook on GPUs only.
"""

import argparse
from pathlib import Path

import lightning
import torch
from torch import distributed, nn
from torch.utils.data import DataLoader, TensorDataset

import hvd_compress


class Compression(lightning.Callback):
    """``build``: makes a compressor from named parameters. Lightning's checkpoint gets the states of all ranks."""

    def __init__(self, build=hvd_compress.IWP, **options):
        self.build, self.options, self.states = build, options, None

    def on_fit_start(self, trainer, module):
        self.compression = self.build(module.named_parameters(), **self.options)
        trainer.strategy.model.register_comm_hook(self.compression, hvd_compress.ddp_hook)
        if self.states is not None:
            self.compression.load_state_dict(self.states[trainer.global_rank])

    def on_load_checkpoint(self, trainer, module, checkpoint):
        self.states = checkpoint["hvd_compress"]  # on another number of ranks: [hvd_compress.reshard(states)] * ranks

    def on_save_checkpoint(self, trainer, module, checkpoint):
        checkpoint["hvd_compress"] = [None] * trainer.world_size
        distributed.all_gather_object(checkpoint["hvd_compress"], self.compression.state_dict())

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.logger and trainer.global_step % 50 == 0:
            trainer.logger.log_metrics(self.compression.metrics(), trainer.global_step)


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
    parser.add_argument("--steps", type=int, default=200, help="a multiple of the 10 of an epoch on 2 ranks")
    parser.add_argument("--checkpoints", type=Path, required=True)
    options = parser.parse_args()
    file = options.checkpoints / "last.ckpt"
    lightning.seed_everything(0)
    x = torch.randn(1280, 128)
    batches, module = DataLoader(TensorDataset(x, x[:, :10].argmax(1)), batch_size=64), Classifier()
    callback = Compression(hvd_compress.IWP, density=1 / 64)
    devices = "auto" if torch.cuda.is_available() else 2
    trainer = lightning.Trainer(
        strategy="ddp", devices=devices, max_epochs=options.steps // 10, callbacks=[callback], logger=False,
        default_root_dir=options.checkpoints, enable_progress_bar=False, enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(module, batches, ckpt_path=str(file) if file.exists() else None, weights_only=True)
    trainer.save_checkpoint(file)
    loss = nn.functional.cross_entropy(module.layers(x[:64]), x[:64, :10].argmax(1))
    ratio = callback.compression.stats()["total"]["wire_ratio"]
    print(f"rank {trainer.global_rank}: {trainer.global_step} steps, loss {loss:.8f}, {ratio:.1f} times fewer bytes")


if __name__ == "__main__":
    main()
