"""Trains with Lightning beside code that steps optimizers or replaces weights: lightning_trainings.py FOLDER CASE...
Started by test_lightning.py on two ranks, without arguments after FOLDER for all cases."""

import copy
import logging
import sys
from pathlib import Path

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from torch import distributed, nn
from torch.utils.data import DataLoader, TensorDataset

from hvd_compress import recipes
from hvd_compress.trainers import CombinedOptimizer, LightningCallback

PERIOD, BATCHES = 4, 10
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


def loader(count):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count * 2 * 8, 16, generator=generator)
    return DataLoader(TensorDataset(x, x[:, :4].argmax(1)), 8)


def flat(module):
    tensors = [*module.parameters(), *(b for b in module.buffers() if b.is_floating_point())]
    return torch.cat([t.detach().flatten().clone() for t in tensors])


def equal_on_all_ranks(tensor):
    others = [torch.empty_like(tensor) for _ in range(distributed.get_world_size())]
    distributed.all_gather(others, tensor)
    return all(torch.equal(other, tensor) for other in others)


class Module(lightning.LightningModule):
    """Notes the weights that it validates."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Linear(32, 4))
        self.validated, self.steps = [], 0

    def loss(self, batch):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def training_step(self, batch, number):
        return self.loss(batch)

    def validation_step(self, batch, number):
        self.validated.append(flat(self.net))
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self):
        self.raw = [torch.optim.SGD(self.net[:2].parameters(), lr=0.1), torch.optim.AdamW(self.net[3:].parameters())]
        return CombinedOptimizer(self.raw)


class Manual(Module):
    """Steps plain optimizers."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, number):
        self.manual_backward(self.loss(batch))
        self.stepped(number)

    def stepped(self, number):
        self.step(*self.raw)

    def step(self, *optimizers):
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.steps += 1


class InTurn(Manual):
    """One optimizer after the other, as a GAN."""

    def stepped(self, number):
        self.step(self.raw[number % 2])


class Accumulated(Manual):
    def stepped(self, number):
        if number % 2:
            self.step(*self.raw)


class AtTheNextBatch(Manual):
    """A step late, in another hook."""

    def stepped(self, number):
        pass

    def on_train_batch_start(self, batch, number):
        if any(p.grad is not None for p in self.net.parameters()):
            self.step(*self.raw)


class AtTheEndOfTheEpoch(Manual):
    """The last step of an epoch comes after its last batch."""

    def stepped(self, number):
        if number < BATCHES - 1:
            self.step(*self.raw)

    def on_train_epoch_end(self):
        self.step(*self.raw)


class ByACallback(Manual):
    def stepped(self, number):
        pass

    def configure_callbacks(self):
        class Steps(lightning.Callback):
            def on_train_batch_end(self, trainer, module, *batch):
                module.step(*module.raw)

        return [Steps()]


def plain_optimizers_are_counted(make):
    """Exchanges, and all ranks validate and end with one model."""
    module, callback = make(), LightningCallback(recipes.low_bit, period=PERIOD)
    fit(module, callback)
    assert module.steps
    assert callback.compression.stats()["steps"] >= module.steps // PERIOD - 1
    assert equal_on_all_ranks(flat(module)) and all(map(equal_on_all_ranks, module.validated)) and module.validated


class Ema(lightning.Callback):
    """Copies an average over time into the module and restores it."""

    def setup(self, trainer, module, stage):
        self.mean, self.kept, self.seen = copy.deepcopy(module.net.state_dict()), None, []

    def on_train_batch_end(self, trainer, module, *batch):
        for name, tensor in module.net.state_dict().items():
            if tensor.is_floating_point():
                self.mean[name].lerp_(tensor, 0.3)

    def put(self, trainer, module):
        self.kept = copy.deepcopy(module.net.state_dict())
        module.net.load_state_dict(self.mean)
        self.seen.append(flat(module.net))

    def restore(self, trainer, module):
        module.net.load_state_dict(self.kept)


class AtValidationStart(Ema):
    on_validation_start, on_validation_end = Ema.put, Ema.restore


class AtValidationEpochStart(Ema):
    on_validation_epoch_start, on_validation_epoch_end, on_train_end = Ema.put, Ema.restore, Ema.put


class StartsEachEpochWithIt(Ema):
    """As Reptile and other outer loops do."""

    on_train_epoch_start = Ema.put


class RollsBack(Ema):
    on_train_epoch_end = Ema.put


def by_lightning():
    return EMAWeightAveraging(decay=0.7, update_every_n_steps=3, use_buffers=False)


def replaced_weights_are_averaged(make, before):
    """Whatever order the callbacks have."""
    module, callback = Module(), LightningCallback(recipes.low_bit, period=PERIOD)
    other = make()
    fit(module, *([other, callback] if before else [callback, other]), val_check_interval=5)
    assert equal_on_all_ranks(flat(module)) and len(module.validated) >= 6
    assert all(map(equal_on_all_ranks, module.validated))
    if make is AtValidationStart:
        for own, validated in zip(other.seen, module.validated[::2], strict=True):
            distributed.all_reduce(own)
            assert torch.allclose(own / 2, validated), "it is not the mean of the ranks' averages"


class InTheEpoch(lightning.Callback):
    """Loads weights in the middle of an epoch, the same on all ranks."""

    def __init__(self, ours):
        self.ours = ours

    def on_train_batch_start(self, trainer, module, batch, number):
        if number == 5:
            module.net.load_state_dict(Module().net.state_dict())
            if self.ours is not None:
                self.ours.take_weights()


def replaced_weights_within_an_epoch():
    callback = LightningCallback(recipes.low_bit, period=PERIOD)
    with pytest.raises(RuntimeError, match="take_weights"):
        fit(Module(), callback, InTheEpoch(None))
    module, callback = Module(), LightningCallback(recipes.low_bit, period=PERIOD)
    fit(module, callback, InTheEpoch(callback))
    assert equal_on_all_ranks(flat(module))


def saved_model(folder):
    """After a validation the average, before it rank 0's own."""
    saves = {
        "epoch": ModelCheckpoint(folder / "epoch", every_n_epochs=1, save_on_train_epoch_end=True, save_top_k=-1),
        "monitor": ModelCheckpoint(folder / "monitor", monitor="val_loss", save_top_k=-1),
        "steps": ModelCheckpoint(folder / "steps", every_n_train_steps=BATCHES, save_top_k=-1),
    }
    module = Module()
    fit(module, LightningCallback(recipes.low_bit, period=PERIOD), *saves.values())
    distributed.barrier()
    for name, save in saves.items():
        first = min(Path(save.dirpath).iterdir(), key=lambda file: file.name)
        state = torch.load(first, weights_only=True)["state_dict"]
        net = Module().net
        net.load_state_dict({key.removeprefix("net."): value for key, value in state.items()})
        averaged = any(torch.equal(flat(net), weights) for weights in module.validated)
        assert averaged == (name != "steps"), name


def fit(module, *callbacks, **options):
    trainer = lightning.Trainer(
        accelerator="cpu", strategy="ddp", devices=2, max_epochs=2, callbacks=list(callbacks), logger=False,
        enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0, default_root_dir=sys.argv[1],
        enable_checkpointing=any(isinstance(callback, ModelCheckpoint) for callback in callbacks), **options,
    )  # fmt: skip
    trainer.fit(module, loader(BATCHES), loader(2))


COUNTED = (Manual, InTurn, Accumulated, AtTheNextBatch, AtTheEndOfTheEpoch, ByACallback)
REPLACED = (by_lightning, AtValidationStart, AtValidationEpochStart, StartsEachEpochWithIt, RollsBack)
CASES = {
    **{f"counts {make.__name__}": (plain_optimizers_are_counted, make) for make in COUNTED},
    **{f"averages {make.__name__}": (replaced_weights_are_averaged, make, True) for make in REPLACED},
    **{f"averages {make.__name__} after": (replaced_weights_are_averaged, make, False) for make in REPLACED[:3:2]},
    "takes weights": (replaced_weights_within_an_epoch,),
    "saves": (saved_model, Path(sys.argv[1], "saved")),
}

if __name__ == "__main__":
    distributed.init_process_group("gloo")
    destroy, distributed.destroy_process_group = distributed.destroy_process_group, lambda *_, **__: None
    for name in sys.argv[2:] or CASES:
        function, *arguments = CASES[name]
        function(*arguments)
        print(f"rank {distributed.get_rank()} ok {name}\n", end="", flush=True)  # in one piece
        distributed.barrier()
    destroy()
