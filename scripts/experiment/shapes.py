"""The parameters of well-known networks as (name, shape), in the order of the model: backward goes from the end."""

from collections.abc import Callable, Iterator

Named = tuple[str, tuple[int, ...]]


def resnet50() -> Iterator[Named]:
    """ResNet-50 for ImageNet: 25.6 M parameters in 161 tensors."""
    yield "stem.weight", (64, 3, 7, 7)
    yield from _affine("stem.norm", 64)
    inputs = 64
    for stage, (width, depth) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3))):
        for number in range(depth):
            layers = [(inputs, width, 1), (width, width, 3), (width, 4 * width, 1)]
            # The first block of a stage projects its shortcut.
            for layer, (before, after, kernel) in enumerate(layers + [(inputs, 4 * width, 1)] * (number == 0)):
                yield f"stage{stage}.{number}.conv{layer}.weight", (after, before, kernel, kernel)
                yield from _affine(f"stage{stage}.{number}.norm{layer}", after)
            inputs = 4 * width
    yield from _affine("linear", 1000, inputs)


def gpt2() -> Iterator[Named]:
    """GPT-2 small (Radford et al. 2019); the head is the word embedding: 124 M."""
    width = 768
    yield "words", (50257, width)
    yield "positions", (1024, width)
    for number in range(12):
        for name, *shape in (
            ("norm1", width), ("attention", 3 * width, width), ("output", width, width),
            ("norm2", width), ("up", 4 * width, width), ("down", width, 4 * width),
        ):  # fmt: skip
            yield from _affine(f"layer{number}.{name}", *shape)
    yield from _affine("norm", width)


def tiny() -> Iterator[Named]:
    """For tests: a convolution, a norm, layers with and without padding, one too small to be compressed."""
    for name, *shape in (
        ("conv", 32, 16, 3, 3),
        ("norm", 32),
        ("wide", 301, 288),
        ("deep", 256, 301),
        ("head", 3, 256),
    ):
        yield from _affine(name, *shape)


SHAPES: dict[str, Callable[[], Iterator[Named]]] = {"resnet50": resnet50, "gpt2": gpt2, "tiny": tiny}


def _affine(name: str, *shape: int) -> Iterator[Named]:
    yield f"{name}.weight", shape
    yield f"{name}.bias", shape[:1]
