"""Images held in memory as uint8 (CIFAR-10 is 180 MB), cut into per-rank batches and augmented a batch at a time."""

import pickle
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from experiment.quality import ACCURACY
from experiment.seeds import generator

CIFAR_FOLDER = "cifar-10-batches-py"


@dataclass(frozen=True)
class Images:
    """Images uint8 (count, channels, height, width) and labels int64 (count,), for training and for testing."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor
    classes: int
    mean: Tensor  # float32 (channels,), of pixels scaled to [0, 1]
    std: Tensor  # float32 (channels,)
    shift: int  # augmentation moves an image by up to this many pixels each way
    flip: bool  # augmentation mirrors half of the images left to right

    metric = ACCURACY

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, pixels of a side, classes."""
        return self.train_images.shape[1], self.train_images.shape[2], self.classes

    def to(self, device: torch.device) -> "Images":
        return replace(self, **{name: value.to(device) for name, value in vars(self).items() if torch.is_tensor(value)})

    def limited(self, count: int) -> "Images":
        """The same set with ``count`` training images, independent of the run's seed."""
        if not 0 < count <= len(self.train_labels):
            raise ValueError(f"--limit-train must be 1..{len(self.train_labels)}, got {count}")
        chosen = torch.randperm(len(self.train_labels), generator=torch.Generator().manual_seed(0))[:count]
        return replace(self, train_images=self.train_images[chosen], train_labels=self.train_labels[chosen])

    def normalise(self, images: Tensor) -> Tensor:
        """uint8 (n, c, h, w) -> float32 of about zero mean and unit variance."""
        scale = (1 / (255 * self.std)).view(1, -1, 1, 1)
        offset = (self.mean / self.std).view(1, -1, 1, 1)
        return images.float().mul_(scale).sub_(offset)

    def steps_per_epoch(self, batch_size: int, ranks: int) -> int:
        """Whole batches that every rank has; the remainder, different in each epoch, is left out."""
        count = len(self.train_labels)
        steps = count // (batch_size * ranks)
        if steps == 0:
            raise ValueError(
                f"{count} training images are fewer than one batch of {batch_size} on each of {ranks} ranks"
            )
        return steps

    def train_batches(
        self, batch_size: int, rank: int, ranks: int, seed: int, epoch: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """This rank's batches of an epoch: float32 (batch, c, h, w) and int64 (batch,), on the data's device."""
        random = generator(seed, epoch, rank)
        indices = shard(len(self.train_labels), rank, ranks, seed, epoch).to(self.train_labels.device)
        for step in range(self.steps_per_epoch(batch_size, ranks)):
            chosen = indices[step * batch_size : (step + 1) * batch_size]
            images = shift_and_flip(self.train_images[chosen], self.shift, self.flip, random)
            yield self.normalise(images), self.train_labels[chosen]

    def test_batches(self, batch_size: int, rank: int, ranks: int) -> Iterator[tuple[Tensor, Tensor]]:
        """This rank's share of the test set, in order; the last batch may be short."""
        images, labels = self.test_images[rank::ranks], self.test_labels[rank::ranks]
        for start in range(0, len(labels), batch_size):
            yield self.normalise(images[start : start + batch_size]), labels[start : start + batch_size]


def digits() -> Images:
    """scikit-learn's 1797 handwritten digits of 8x8 pixels, a fixed stratified split of 80 to 20."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    bunch = load_digits()
    # Pixels are 0..16; as bytes they share the normalisation of the other sets.
    images = (bunch.images * (255 / 16)).round().astype(np.uint8)[:, None]
    split = train_test_split(images, bunch.target, test_size=0.2, random_state=0, stratify=bunch.target)
    train_images, test_images, train_labels, test_labels = map(torch.from_numpy, split)
    return Images(
        train_images, train_labels.long(), test_images, test_labels.long(), 10, *_moments(train_images), 1, False
    )


def cifar10(folder: Path) -> Images:
    """CIFAR-10 from the standard Python folder, which is ``folder`` itself or lies below it."""
    root = folder if folder.name == CIFAR_FOLDER else folder / CIFAR_FOLDER
    if not (root / "test_batch").is_file():
        raise FileNotFoundError(
            f"no CIFAR-10 at {root}: download cifar-10-python.tar.gz from https://www.cs.toronto.edu/~kriz/cifar.html, "
            f"unpack it, and pass --data-dir the folder that holds {CIFAR_FOLDER}/"
        )
    train = [_cifar_batch(path) for path in sorted(root.glob("data_batch_*"))]
    train_images, train_labels = map(torch.cat, zip(*train, strict=True))
    test_images, test_labels = _cifar_batch(root / "test_batch")
    return Images(train_images, train_labels, test_images, test_labels, 10, *_moments(train_images), 4, True)


def synthetic(size: int = 32, classes: int = 10, count: int = 8192) -> Images:
    """Deterministic images (3, size, size): a coarse pattern per class with noise, so that they can be learnt."""
    random = torch.Generator().manual_seed(0)
    patterns = torch.rand(classes, 3, 4, 4, generator=random)

    def images(labels: Tensor) -> Tensor:
        coarse = torch.nn.functional.interpolate(patterns[labels], size=size)
        noise = torch.rand(coarse.shape, generator=random)
        return coarse.mul_(0.3).add_(noise, alpha=0.7).mul_(255).to(torch.uint8)

    train_labels = torch.randint(classes, (count,), generator=random)
    test_labels = torch.randint(classes, (count // 4,), generator=random)
    train_images = images(train_labels)
    moments = _moments(train_images)
    return Images(train_images, train_labels, images(test_labels), test_labels, classes, *moments, size // 8, False)


def shard(count: int, rank: int, ranks: int, seed: int, epoch: int) -> Tensor:
    """Indices int64 of the images that ``rank`` sees in ``epoch``: disjoint over ranks, together all of them."""
    return torch.randperm(count, generator=generator(seed, epoch))[rank::ranks]


def shift_and_flip(images: Tensor, shift: int, flip: bool, random: torch.Generator) -> Tensor:
    """Random crop after reflecting ``shift`` pixels at the border, and mirroring, for each image: one map from target
    to source pixel, hence one gather. Images and result are uint8 (n, c, h, w)."""
    n, c, h, w = images.shape
    moves = torch.randint(-shift, shift + 1, (2, n, 1), generator=random)
    rows = _reflect(torch.arange(h) + moves[0], h)  # (n, h)
    columns = _reflect(torch.arange(w) + moves[1], w)  # (n, w)
    if flip:
        mirrored = torch.rand(n, 1, generator=random) < 0.5
        columns = torch.where(mirrored, columns.flip(1), columns)
    source = (rows[:, :, None] * w + columns[:, None, :]).view(n, 1, h * w).to(images.device)
    return images.view(n, c, h * w).gather(2, source.expand(n, c, h * w)).view(n, c, h, w)


def _reflect(position: Tensor, length: int) -> Tensor:
    """Positions outside 0..length-1 mirrored at the first and last pixel."""
    return (length - 1) - ((length - 1) - position.abs()).abs()


def _moments(images: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation float32 (channels,) of uint8 images, in units of 255, from an exact histogram."""
    levels = torch.arange(256, dtype=torch.float64) / 255
    counts = torch.stack([torch.bincount(images[:, c].flatten(), minlength=256) for c in range(images.shape[1])])
    share = counts.double() / counts.sum(1, keepdim=True)
    mean = share @ levels
    variance = share @ levels.square() - mean.square()
    return mean.float(), variance.sqrt().float()


def _cifar_batch(path: Path) -> tuple[Tensor, Tensor]:
    """Images uint8 (n, 3, 32, 32) and labels int64 (n,) of one batch file."""
    with path.open("rb") as file:
        content = _ArrayUnpickler(file, encoding="bytes").load()
    # The official files come from Python 2 (keys are bytes); copies written by Python 3 have str.
    content = {key.decode() if isinstance(key, bytes) else key: value for key, value in content.items()}
    images = torch.from_numpy(np.ascontiguousarray(content["data"]).reshape(-1, 3, 32, 32))
    return images, torch.tensor(content["labels"], dtype=torch.int64)


class _ArrayUnpickler(pickle.Unpickler):
    """Unpickler that builds NumPy arrays and built-in containers only: a downloaded file must not run code."""

    ALLOWED = (
        "numpy._core.multiarray._reconstruct", "numpy._core.numeric._frombuffer", "numpy.ndarray", "numpy.dtype",
        "_codecs.encode",
    )  # fmt: skip

    def find_class(self, module: str, name: str) -> object:
        # The module's old name was removed from later NumPy releases.
        module = module.replace("numpy.core", "numpy._core")
        if f"{module}.{name}" not in self.ALLOWED:
            raise pickle.UnpicklingError(f"a CIFAR-10 batch must not contain {module}.{name}")
        return super().find_class(module, name)
