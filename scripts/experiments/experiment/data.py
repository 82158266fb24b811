"""The data sets by name, and what a training asks of one."""

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from experiment import images, tags, text
from experiment.quality import Metric

#: What a data set consists of: a model reads the one or the other.
DATASETS = {
    "digits": "images",
    "cifar10": "images",
    "synthetic": "images",
    "text": "text",
    "shakespeare": "text",
    "text-tags": "tagged text",
}


class Data(Protocol):
    """Inputs and targets int64, for training and for testing."""

    @property
    def metric(self) -> Metric: ...

    @property
    def shape(self) -> tuple[int, ...]:
        """What a model must know of it, see :func:`experiment.models.build`."""

    def to(self, device: torch.device) -> "Data": ...

    def limited(self, count: int) -> "Data":
        """With less to train on; ``ValueError`` if ``count`` is out of range."""

    def steps_per_epoch(self, batch_size: int, ranks: int) -> int:
        """The same on all ranks; ``ValueError`` if there is too little data."""

    def train_batches(
        self, batch_size: int, rank: int, ranks: int, seed: int, epoch: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """A rank's batches of an epoch."""

    def test_batches(self, batch_size: int, rank: int, ranks: int) -> Iterator[tuple[Tensor, Tensor]]:
        """A rank's share of the test set."""


@functools.cache  # ranks in one process share it
def load(name: str, folder: Path | None = None, context: int = 64) -> Data:
    """``folder`` is for cifar10 and shakespeare, ``context``, the bytes that a model reads, for text."""
    if name == "text":
        return text.standard_library(context)
    if name == "shakespeare":
        if folder is None:
            raise ValueError(f"--data shakespeare needs --data-dir, the folder that holds {text.SHAKESPEARE}")
        return text.shakespeare(folder, context)
    if name == "text-tags":
        return tags.standard_library(context)
    if name == "cifar10":
        if folder is None:
            raise ValueError(f"--data cifar10 needs --data-dir, the folder that holds {images.CIFAR_FOLDER}/")
        return images.cifar10(folder)
    return images.digits() if name == "digits" else images.synthetic()
