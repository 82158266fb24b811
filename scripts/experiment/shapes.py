"""The parameters of well-known networks, as shapes: in the order of the model, so that backward goes from the end."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise

import torch

from experiment import models

Shape = tuple[int, ...]
Named = tuple[str, Shape]


def resnet50() -> Iterator[Named]:
    """ResNet-50 for ImageNet: 25.6 M parameters in 161 tensors."""
    with torch.device("meta"):
        model = models.resnet50(3, 224, 1000)
    return ((name, tuple(parameter.shape)) for name, parameter in model.named_parameters())


def vgg16() -> Iterator[Named]:
    """VGG-16 for ImageNet, without norms: 138 M, of which one layer has 103 M."""
    widths = (64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512)
    channels = 3
    for number, width in enumerate(widths):
        yield from _affine(f"conv{number}", width, channels, 3, 3)
        channels = width
    yield from _classifier((512 * 7 * 7, 4096, 4096, 1000))


def alexnet() -> Iterator[Named]:
    """AlexNet with one column of convolutions (Krizhevsky 2014), as torchvision has it: 61.1 M."""
    channels = 3
    for number, (width, kernel) in enumerate(((64, 11), (192, 5), (384, 3), (256, 3), (256, 3))):
        yield from _affine(f"conv{number}", width, channels, kernel, kernel)
        channels = width
    yield from _classifier((256 * 6 * 6, 4096, 4096, 1000))


def bert_base() -> Iterator[Named]:
    """BERT-base, uncased (Devlin et al. 2019), with its pooler and without heads: 109 M."""
    width = 768
    for name, rows in (("words", 30522), ("positions", 512), ("types", 2)):
        yield f"embeddings.{name}", (rows, width)
    yield from _norm("embeddings.norm", width)
    for number in range(12):
        layer = f"layer{number}"
        for name in ("query", "key", "value", "output"):
            yield from _affine(f"{layer}.{name}", width, width)
        yield from _norm(f"{layer}.norm1", width)
        yield from _affine(f"{layer}.up", 4 * width, width)
        yield from _affine(f"{layer}.down", width, 4 * width)
        yield from _norm(f"{layer}.norm2", width)
    yield from _affine("pooler", width, width)


def gpt2() -> Iterator[Named]:
    """GPT-2 small (Radford et al. 2019); the head is the word embedding: 124 M."""
    width = 768
    yield "words", (50257, width)
    yield "positions", (1024, width)
    for number in range(12):
        layer = f"layer{number}"
        yield from _norm(f"{layer}.norm1", width)
        yield from _affine(f"{layer}.attention", 3 * width, width)
        yield from _affine(f"{layer}.output", width, width)
        yield from _norm(f"{layer}.norm2", width)
        yield from _affine(f"{layer}.up", 4 * width, width)
        yield from _affine(f"{layer}.down", width, 4 * width)
    yield from _norm("norm", width)


def tiny() -> Iterator[Named]:
    """For tests: a convolution, a norm, layers with and without padding, one too small to be compressed."""
    yield from _affine("conv", 32, 16, 3, 3)
    yield from _norm("norm", 32)
    yield from _affine("wide", 301, 288)
    yield from _affine("deep", 256, 301)
    yield from _affine("head", 3, 256)


SHAPES: dict[str, Callable[[], Iterator[Named]]] = {
    "resnet50": resnet50,
    "vgg16": vgg16,
    "alexnet": alexnet,
    "bert-base": bert_base,
    "gpt2": gpt2,
    "tiny": tiny,
}


def total(named: Iterable[Named]) -> int:
    """Entries of all tensors."""
    return sum(math.prod(shape) for _, shape in named)


def _affine(name: str, *shape: int) -> Iterator[Named]:
    yield f"{name}.weight", shape
    yield f"{name}.bias", shape[:1]


def _norm(name: str, width: int) -> Iterator[Named]:
    yield f"{name}.weight", (width,)
    yield f"{name}.bias", (width,)


def _classifier(widths: Sequence[int]) -> Iterator[Named]:
    for number, (inputs, outputs) in enumerate(pairwise(widths)):
        yield from _affine(f"linear{number}", outputs, inputs)
