"""Text as bytes: the source files of Python's standard library, which every machine has, those of all installed
packages, or Shakespeare's plays."""

import functools
import hashlib
import os
import site
import sysconfig
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from experiment.quality import BITS_PER_BYTE
from experiment.seeds import generator

#: Folders that are left out: installed packages, tests, and tables of characters and of help texts.
EXCLUDED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}
#: The installed packages have their tests and tables, too, up to this length of a file: longer ones are generated.
LONGEST_FILE = 1 << 20
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


@dataclass(frozen=True)
class Sources:
    """The source files of the installed packages and of the standard library.

    Args:
        listing: a line of each file: name below its root, bytes, SHA-256, "train" or "held out"; sorted by name, each
            content once.
    """

    train: Tensor
    held_out: Tensor
    listing: list[str]

    @property
    def checksum(self) -> str:
        """SHA-256 of the listing, shortened."""
        return hashlib.sha256("\n".join(self.listing).encode()).hexdigest()[:16]

    def __str__(self) -> str:
        return (
            f"{len(self.listing)} files, {len(self.train):,} bytes to train on, {len(self.held_out):,} held out,"
            f" list {self.checksum}"
        )


def installed_sources(context: int) -> Text:
    """The Python sources on this machine, of :func:`sources`: hundreds of millions of bytes beside a PyTorch."""
    found = sources()
    return Text(found.train, found.held_out, context)


@functools.cache
def sources() -> Sources:
    """The running Python's own. A tenth of the files is held out, chosen by a hash of their names."""
    folders = [sysconfig.get_path(name) for name in ("purelib", "platlib")] + site.getsitepackages()
    return read_sources([Path(sysconfig.get_path("stdlib")), *map(Path, folders)])


def read_sources(roots: Iterable[Path]) -> Sources:
    """All sources below the roots; packages within the standard library's folder only if they are a root."""
    files = {}
    for root in dict.fromkeys(root.resolve() for root in roots):
        for name in source_files(root, {"site-packages", "dist-packages"}):
            if (root / name).is_file():  # no broken link
                files.setdefault(name, root / name)
    parts, listing, seen = {True: bytearray(), False: bytearray()}, [], set()
    for name in sorted(files):
        content = files[name].read_bytes()
        digest = hashlib.sha256(content).hexdigest()
        # A file that is there twice must not be on both sides.
        if len(content) > LONGEST_FILE or digest in seen:
            continue
        seen.add(digest)
        parts[is_held_out(name)] += content
        listing.append(f"{name} {len(content)} {digest} {'held out' if is_held_out(name) else 'train'}")
    train, held_out = (torch.from_numpy(np.frombuffer(parts[key], np.uint8)) for key in (False, True))
    return Sources(train, held_out, listing)


def source_files(root: Path, excluded: Collection[str] = EXCLUDED) -> list[str]:
    """Paths below ``root``, sorted; without the excluded folders."""
    found = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in excluded]
        found += [(Path(folder) / name).relative_to(root).as_posix() for name in files if name.endswith(".py")]
    return sorted(found)


def is_held_out(name: str) -> bool:
    return hashlib.sha256(name.encode()).digest()[0] < 26
