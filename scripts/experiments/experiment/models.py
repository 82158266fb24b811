"""The networks of the experiments, each without pretrained weights and without torchvision."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hvd_compress
from experiment.transformers import GPT, GPTTagger, ViT


@dataclass(frozen=True)
class Model:
    constructor: Callable[..., nn.Module]
    reads: str = "images"  # a value of data.DATASETS
    smallest: int = 1  # pixels of a side


def build(name: str, *shape: int) -> nn.Module:
    """A fresh network for data of this shape, see :mod:`experiment.data`. For images (channels, size, classes): maps
    float (n, c, size, size) to logits (n, classes). For text (vocabulary, context): maps int64 (n, length) to logits
    (n, length, vocabulary). For tagged text (vocabulary, context, tags): the same to logits (n, length, tags)."""
    model = MODELS[name]
    if shape[1] < model.smallest:
        raise ValueError(f"model {name} needs images of at least {model.smallest} pixels, these have {shape[1]}")
    return model.constructor(*shape)


def mlp(channels: int, size: int, classes: int) -> nn.Module:
    """Two hidden layers, as wide as 100 thousand parameters allow."""
    inputs = channels * size * size
    linear = inputs + classes + 2  # parameters = width^2 + linear * width + classes
    width = int((-linear + math.sqrt(linear**2 + 4 * 100_000)) / 2)
    hidden = [nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(width, classes))


def cnn(channels: int, size: int, classes: int) -> nn.Module:
    """Four convolutions, 0.19 M parameters, over 99 % of them in tensors of 1024 entries or more: what is sent
    uncompressed, the first layer and the norms, hardly affects a compressor's ratio."""
    layers: list[nn.Module] = []
    for width in (32, 64, 96, 128):
        layers += [*_conv_norm(channels, width), nn.ReLU(inplace=True)]
        channels = width
        if size > 4:  # 32 pixels are halved thrice, 8 once: the wide layers always work on 4x4
            layers.append(nn.MaxPool2d(2))
            size //= 2
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


def vgg11(channels: int, size: int, classes: int) -> nn.Module:
    """VGG-11 with batch norm and one linear layer, as is usual for 32x32 images: 9.2 M parameters."""
    layers: list[nn.Module] = []
    for width in (64, 0, 128, 0, 256, 256, 0, 512, 512, 0, 512, 512, 0):
        if width == 0:
            layers.append(nn.MaxPool2d(2))
        else:
            layers += [*_conv_norm(channels, width), nn.ReLU(inplace=True)]
            channels = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


class BasicBlock(nn.Module):
    """Two 3x3 convolutions; the shortcut has no parameters (option A: subsampled, padded with zero channels)."""

    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        self.body = nn.Sequential(
            *_conv_norm(inputs, outputs, stride=stride), nn.ReLU(inplace=True), *_conv_norm(outputs, outputs)
        )
        self.stride, self.extra = stride, outputs - inputs

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        if self.extra:
            x = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.extra))
        return F.relu(x + y)


def resnet20(channels: int, size: int, classes: int) -> nn.Module:
    """ResNet-20 for CIFAR (He et al. 2016, section 4.2): 0.27 M parameters."""
    blocks: list[nn.Module] = []
    inputs = 16
    for outputs, stride in ((16, 1), (32, 2), (64, 2)):
        for index in range(3):
            blocks.append(BasicBlock(inputs, outputs, stride if index == 0 else 1))
            inputs = outputs
    stem = [*_conv_norm(channels, 16), nn.ReLU(inplace=True)]
    return _initialised(
        nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))
    )


def _conv_norm(inputs: int, outputs: int, kernel: int = 3, stride: int = 1) -> list[nn.Module]:
    """Convolution that keeps the size at stride 1, without the bias that the norm would cancel."""
    convolution = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)
    return [convolution, nn.BatchNorm2d(outputs)]


def _initialised(model: nn.Module) -> nn.Module:
    """He initialisation over fan-out, the residual networks' own."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return model


MODELS: dict[str, Model] = {
    "mlp": Model(mlp),
    "cnn": Model(cnn, smallest=4),
    "resnet20": Model(resnet20, smallest=4),
    "vgg11": Model(vgg11, smallest=32),
    "vit": Model(partial(ViT, patch=4, width=128, layers=4, heads=4), smallest=4),  # 0.54 M parameters
    "gpt-70k": Model(partial(GPT, width=48, layers=2, heads=2), reads="text"),  # 0.07 M
    "gpt": Model(partial(GPT, width=96, layers=2, heads=4), reads="text"),  # 0.26 M
    "gpt-tagger": Model(partial(GPTTagger, width=96, layers=2, heads=4), reads="tagged text"),
    "nanogpt": Model(partial(GPT, width=128, layers=4, heads=4), reads="text"),  # 0.83 M, as its README on a CPU
    "gpt-124m": Model(lambda _, context: GPT(50304, context, 768, 12, 12), reads="text"),  # GPT-2's shapes
    "gpt-1m": Model(partial(GPT, width=160, layers=3, heads=4), reads="text"),  # 0.97 M
    "gpt-2m": Model(partial(GPT, width=256, layers=3, heads=4), reads="text"),  # 2.5 M
    "gpt-5m": Model(partial(GPT, width=384, layers=3, heads=4), reads="text"),  # 5.5 M
    "gpt-10m": Model(partial(GPT, width=512, layers=3, heads=4), reads="text"),  # 9.7 M
}


def load_pretrained(model: nn.Module, file: Path) -> None:
    """Loads the weights of another task's model, all but the head's. ``ValueError`` for those of another network."""
    saved, own = torch.load(file, weights_only=True), model.state_dict()
    body = [name for name in own if not name.startswith("head.")]
    for name in body:
        if (given := _shape(saved, name)) != (wanted := _shape(own, name)):
            raise ValueError(f"{file}: {name} is {given}, and the model's is {wanted}")
    model.load_state_dict({name: saved[name] for name in body}, strict=False)


def _shape(state: dict[str, Tensor], name: str) -> tuple[int, ...] | None:
    return tuple(state[name].shape) if name in state else None


def hidden_matrices(model: nn.Module) -> list[str]:
    """The names of all parameters of two or more dimensions that are no embeddings; the head of a ViT is one."""
    positions = [name for name, _ in model.named_parameters() if name == "positions"]
    return list(hvd_compress.hidden_matrices(model, filters=True, others=positions)[0])
