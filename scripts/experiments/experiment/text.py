"""Text as bytes: the source files of Python's standard library, which every machine has, or Shakespeare's plays."""

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from experiment.quality import BITS_PER_BYTE
from experiment.seeds import generator

#: Folders that are left out: installed packages, tests, and tables of characters and of help texts.
EXCLUDED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}
#: All plays in one file, as published with char-rnn and used by nanoGPT.
SHAKESPEARE = "tinyshakespeare.txt"
#: The standard library of one Python, as :func:`store_library` writes it.
STORED_LIBRARY = "standard_library.pt"
#: Windows are drawn at random, so an epoch has no natural length.
STEPS_PER_EPOCH = 100
#: A test predicts at most so many bytes.
TESTED = 1 << 17


@dataclass(frozen=True)
class Text:
    """Bytes uint8 (length,), for training and for testing; a model predicts each byte of a window from those before."""

    train: Tensor
    held_out: Tensor
    context: int  # bytes that a model reads

    metric = BITS_PER_BYTE

    @property
    def shape(self) -> tuple[int, int]:
        """Different bytes, length of a window."""
        return 256, self.context

    def to(self, device: torch.device) -> "Text":
        return replace(self, train=self.train.to(device), held_out=self.held_out.to(device))

    def limited(self, count: int) -> "Text":
        """The same with the first ``count`` bytes to train on."""
        if not self.context < count <= len(self.train):
            raise ValueError(f"--limit-train must be {self.context + 1}..{len(self.train)}, got {count}")
        return replace(self, train=self.train[:count])

    def steps_per_epoch(self, batch_size: int, ranks: int) -> int:
        return STEPS_PER_EPOCH

    def train_batches(
        self, batch_size: int, rank: int, ranks: int, seed: int, epoch: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """This rank's batches of an epoch: bytes and the bytes that follow them, int64 (batch, context).

        All ranks draw the windows of the global batch, and each takes its share: the global batch does not depend on
        the number of ranks.
        """
        random = generator(seed, epoch)
        for _ in range(self.steps_per_epoch(batch_size, ranks)):
            starts = torch.randint(len(self.train) - self.context, (batch_size * ranks,), generator=random)
            yield self._windows(self.train, starts[rank::ranks])

    def test_batches(self, batch_size: int, rank: int, ranks: int) -> Iterator[tuple[Tensor, Tensor]]:
        """This rank's share of fixed windows, evenly spread over the held-out text; the last batch may be short."""
        count = min(TESTED, len(self.held_out) - 1) // self.context
        starts = torch.arange(count) * (len(self.held_out) - self.context) // count
        for part in starts[rank::ranks].split(batch_size):
            yield self._windows(self.held_out, part)

    def _windows(self, text: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
        windows = text[(starts[:, None] + torch.arange(self.context + 1)).to(text.device)].long()
        return windows[:, :-1], windows[:, 1:]


def standard_library(context: int) -> Text:
    """The running Python's own. A tenth of the files is held out, chosen by a hash of their names."""
    root = Path(sysconfig.get_path("stdlib"))
    names = source_files(root)
    train, held_out = (
        torch.from_numpy(np.frombuffer(b"".join((root / name).read_bytes() for name in part), np.uint8).copy())
        for part in ([n for n in names if not is_held_out(n)], [n for n in names if is_held_out(n)])
    )
    return Text(train, held_out, context)


def store_library(folder: Path) -> Path:
    """Writes the running Python's standard library for :func:`stored_library`, on machines with another Python."""
    text = standard_library(context=1)
    folder.mkdir(parents=True, exist_ok=True)
    torch.save({"train": text.train, "held_out": text.held_out}, folder / STORED_LIBRARY)
    return folder / STORED_LIBRARY


def stored_library(folder: Path, context: int) -> Text:
    """``FileNotFoundError`` if the folder has no such file."""
    file = folder / STORED_LIBRARY
    if not file.is_file():
        raise FileNotFoundError(f"there is no {file}: write it with ranks_apart.py --write-text {folder}")
    parts = torch.load(file, weights_only=True)
    return Text(parts["train"], parts["held_out"], context)


def shakespeare(folder: Path, context: int) -> Text:
    """Held out is the last tenth, as in nanoGPT. ``FileNotFoundError`` if the folder has no such file."""
    file = folder / SHAKESPEARE
    if not file.is_file():
        raise FileNotFoundError(f"--data shakespeare: there is no {file}")
    whole = torch.from_numpy(np.frombuffer(file.read_bytes(), np.uint8).copy())
    train, held_out = whole.split([len(whole) * 9 // 10, len(whole) - len(whole) * 9 // 10])
    return Text(train, held_out, context)


def source_files(root: Path) -> list[str]:
    """Paths below ``root``, sorted."""
    found = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in EXCLUDED]
        found += [(Path(folder) / name).relative_to(root).as_posix() for name in files if name.endswith(".py")]
    return sorted(found)


def is_held_out(name: str) -> bool:
    return hashlib.sha256(name.encode()).digest()[0] < 26
