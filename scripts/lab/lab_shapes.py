"""The models of ``bench_exchange.py``: those of ``hvd-compress``, and two of its own."""

from collections.abc import Callable, Iterator

from hvd_compress.cli import shapes
from hvd_compress.cli.shapes import Named


def gpt30m() -> Iterator[Named]:
    """A GPT of six layers with GPT-2's vocabulary: 30.3 M."""
    yield from shapes.gpt(width=384, depth=6)


def tiny() -> Iterator[Named]:
    """Shapes for tests: a convolution, a norm, layers with and without padding, one too small to be compressed."""
    for name, *shape in (
        ("conv", 32, 16, 3, 3),
        ("norm", 32),
        ("wide", 301, 288),
        ("deep", 256, 301),
        ("head", 3, 256),
    ):
        yield from shapes.affine(name, *shape)


SHAPES: dict[str, Callable[[], Iterator[Named]]] = {**shapes.SHAPES, "gpt30m": gpt30m, "tiny": tiny}
