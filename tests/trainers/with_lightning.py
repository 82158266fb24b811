"""Lightning, with DDP."""

import lightning
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from problem import ACCUMULATION, BATCH, SAVED, STEPS, data, net, optimizers, schedule
from torch.utils.data import DataLoader

from hvd_compress.trainers import LightningCallback


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = net()

    def training_step(self, batch, number):
        return self.net(*batch)["loss"]

    def validation_step(self, batch, number):
        self.log("val_loss", self.net(*batch)["loss"])

    def configure_optimizers(self):
        optimizer = optimizers(self.net)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule(optimizer), "interval": "step"}}


class Logger(CSVLogger):
    """Keeps what it is given."""

    def __init__(self, folder):
        super().__init__(folder)
        self.kept = {}

    def log_metrics(self, metrics, step=None):
        self.kept |= metrics
        super().log_metrics(metrics, step)


def train(folder, build, options, *, resume=False, evaluate=False, average=True):
    """See with_transformers.py. An epoch has ``SAVED`` steps."""
    module, logger = Module(), Logger(folder)
    callback = LightningCallback(build, average=average, **options)
    save = ModelCheckpoint(folder, "{step}", every_n_epochs=1, save_top_k=-1, save_on_train_epoch_end=True)
    stop = [EarlyStopping("val_loss", min_delta=1e9, patience=1)] if evaluate else []
    trainer = lightning.Trainer(
        accelerator="cpu", strategy="ddp", devices=2, max_epochs=STEPS // SAVED, accumulate_grad_batches=ACCUMULATION,
        callbacks=[*stop, callback, save], logger=logger, log_every_n_steps=2, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=folder, num_sanity_val_steps=1,
    )  # fmt: skip
    validation = DataLoader(data(32), BATCH) if evaluate else None
    checkpoint = str(folder / f"step={SAVED}.ckpt") if resume else None
    trainer.fit(module, DataLoader(data(), BATCH), validation, ckpt_path=checkpoint, weights_only=True)
    if evaluate:
        module.net.evaluated = module.net.evaluated[1:]  # the sanity check's
    return module.net, callback, trainer.global_step, logger.kept
