"""The data sets by name: each has the attributes and methods of :class:`experiment.text.Text`."""

import functools
from pathlib import Path
from typing import Any

from experiment import images, tags, text

#: What a data set consists of: a model reads the one or the other.
DATASETS = {
    "digits": "images",
    "cifar10": "images",
    "synthetic": "images",
    "text": "text",
    "shakespeare": "text",
    "installed": "text",
    "text-tags": "tagged text",
}


@functools.cache  # ranks in one process share it
def load(name: str, folder: Path | None = None, context: int = 64) -> Any:
    """``folder`` is for cifar10 and shakespeare, ``context``, the bytes that a model reads, for text."""
    if name == "text":
        return text.standard_library(context)
    if name == "installed":
        return text.installed_sources(context)
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
