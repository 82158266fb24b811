"""The parameters of well-known networks as (name, shape), in the order of the model: backward goes from the end."""

import runpy
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

Named = tuple[str, tuple[int, ...]]


def resnet50() -> Iterator[Named]:
    """ResNet-50 for ImageNet: 25.6 M parameters in 161 tensors."""
    yield "stem.weight", (64, 3, 7, 7)
    yield from affine("stem.norm", 64)
    inputs = 64
    for stage, (width, depth) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3))):
        for number in range(depth):
            layers = [(inputs, width, 1), (width, width, 3), (width, 4 * width, 1)]
            # The first block of a stage projects its shortcut.
            for layer, (before, after, kernel) in enumerate(layers + [(inputs, 4 * width, 1)] * (number == 0)):
                yield f"stage{stage}.{number}.conv{layer}.weight", (after, before, kernel, kernel)
                yield from affine(f"stage{stage}.{number}.norm{layer}", after)
            inputs = 4 * width
    yield from affine("linear", 1000, inputs)


def gpt2() -> Iterator[Named]:
    """GPT-2 small (Radford et al. 2019); the head is the word embedding: 124 M."""
    yield from gpt(width=768, depth=12)


def gpt(width: int, depth: int) -> Iterator[Named]:
    """A GPT with GPT-2's vocabulary."""
    yield "words", (50257, width)
    yield "positions", (1024, width)
    for number in range(depth):
        for name, *shape in (
            ("norm1", width), ("attention", 3 * width, width), ("output", width, width),
            ("norm2", width), ("up", 4 * width, width), ("down", width, 4 * width),
        ):  # fmt: skip
            yield from affine(f"layer{number}.{name}", *shape)
    yield from affine("norm", width)


def affine(name: str, *shape: int) -> Iterator[Named]:
    """A weight, and a bias for each of its rows."""
    yield f"{name}.weight", shape
    yield f"{name}.bias", shape[:1]


SHAPES: dict[str, Callable[[], Iterator[Named]]] = {"resnet50": resnet50, "gpt2": gpt2}


def named(model: str) -> list[Named]:
    """The parameters of ``model``: a name of SHAPES, or ``PATH.py:FUNCTION``, a function of no arguments that returns a
    ``torch.nn.Module``, built without memory for its weights if possible. Raises ``ValueError`` if there is no such
    model, or the function fails or returns another object, or a module without trainable parameters."""
    if model in SHAPES:
        return list(SHAPES[model]())
    path, colon, name = model.rpartition(":")
    if not colon or not path.endswith(".py"):
        raise ValueError(f"a model is {', '.join(SHAPES)} or PATH.py:FUNCTION, got {model!r}")
    if not Path(path).is_file():
        raise ValueError(f"{path}: no such file")
    module = _build(path, name)
    if not isinstance(module, torch.nn.Module):
        raise ValueError(f"{name} of {path} returns {type(module).__name__}, not a torch.nn.Module")
    found = [(name, tuple(p.shape)) for name, p in module.named_parameters() if p.requires_grad and p.numel()]
    if not found:
        raise ValueError(f"the module of {model} has no trainable parameters")
    return found


def _build(path: str, name: str) -> Any:
    """Calls a function of a file, which can import its neighbours."""
    folder = str(Path(path).resolve().parent)
    sys.path.insert(0, folder)
    try:
        function = runpy.run_path(path).get(name)
        if callable(function):
            try:
                with torch.device("meta"):
                    return function()
            except Exception:  # such as one that reads its weights
                return function()
    except (Exception, SystemExit) as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
        at = f"{path}:{lines[-1]}" if lines else path
        raise ValueError(f"{at}: the model cannot be built: {type(error).__name__}: {error}") from error
    finally:
        with suppress(ValueError):
            sys.path.remove(folder)
    raise ValueError(f"{path} has no function {name}")
