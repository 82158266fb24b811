"""The compression methods of the experiments: command-line options, construction, byte accounting of stock hooks.

The options of a method are the keyword arguments of its class: ``explore: float = 0.05`` becomes ``--explore``, a bool
becomes ``--name`` and ``--no-name``. An argument of another type (a process group, a predictor) has no option. Every
class that hvd_compress exports is a method. ``train.py --compression iwp --help`` shows the options of a method; an
option of another method is refused.
"""

import argparse
import inspect
import re
import time
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

import hvd_compress
from experiment.models import hidden_matrices
from hvd_compress.engine.shards import local
from hvd_compress.engine.wire_stats import WireStats

# Arguments that the run decides: its --seed, and the momentum, which --momentum-correction moves into the compressor.
_NOT_OPTIONS = {"named_parameters", "seed", "momentum"}


@dataclass(frozen=True)
class Method:
    kind: Any = None  # the class in hvd_compress; None for what Horovod and torch bring along
    hosts: tuple[str, ...] = ("horovod", "ddp", "fsdp", "threads")
    optimizer: str = "sgd"  # by default; "plain" for a method that allows no other

    def options(self) -> dict[str, tuple[Any, Any]]:
        """Name -> (type, default) of each option; type is bool, int, float or str: the arguments of the class and of
        its bases."""
        found: dict[str, tuple[Any, Any]] = {}
        for owner in self.kind.__mro__ if self.kind else ():
            if "__init__" not in vars(owner):
                continue
            hints = typing.get_type_hints(owner.__init__)
            for name, parameter in inspect.signature(owner.__init__).parameters.items():
                kind = _option_type(hints.get(name))
                if kind and parameter.default is not parameter.empty and name not in _NOT_OPTIONS:
                    found.setdefault(name, (kind, parameter.default))
        return found

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        documented = {name: text for owner in reversed(self.kind.__mro__ if self.kind else ())
                      for name, text in _documented(owner).items() if not text.startswith("see ")}  # fmt: skip
        for name, (kind, default) in self.options().items():
            flag, text = f"--{name.replace('_', '-')}", documented.get(name, "")
            if kind is bool:
                parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=default, help=text)
            else:
                text, convert = f"{text} (default: {default})", _PARSERS[kind]
                parser.add_argument(flag, type=convert, default=default, help=text, metavar=name.upper())
        if hasattr(self.kind, "take_momentum"):
            # DGC without momentum correction is not DGC.
            parser.add_argument(
                "--momentum-correction", action=argparse.BooleanOptionalAction, default=self.kind is hvd_compress.DGC,
                help="move the momentum of SGD into the compressor, before the residual",
            )  # fmt: skip

    def defaults(self) -> dict[str, Any]:
        """The method's options and their defaults."""
        parser = argparse.ArgumentParser()
        self.add_arguments(parser)
        return vars(parser.parse_args([]))

    def build(
        self, args: argparse.Namespace, model: torch.nn.Module, optimizer: torch.optim.Optimizer, **more: Any
    ) -> Any:
        """The compressor of hvd_compress. Only what differs from a default is passed: a base class may have arguments
        that a class sets itself."""
        given = {name: getattr(args, name) for name, (_, default) in self.options().items()
                 if getattr(args, name) != default}  # fmt: skip
        if given.get("orthogonal"):
            given["orthogonal"] = hidden_matrices(model)
        if hasattr(self.kind, "take_momentum"):
            given["momentum"] = 0.0  # that of DGC's constructor is for an optimizer without
        compression = self.kind(model.named_parameters(), seed=args.seed, **given, **more)
        if getattr(args, "momentum_correction", False):
            compression.take_momentum(optimizer)
        return compression


def _option_type(hint: Any) -> Any:
    """The type of the option for an annotation such as ``float | None`` or ``Literal["fp16", "fp32"]``."""
    members = typing.get_args(hint) if isinstance(hint, types.UnionType) or typing.get_args(hint) else (hint,)
    if typing.get_origin(hint) is typing.Literal:
        return str
    return next((kind for kind in (bool, float, int, str) if kind in members), None)


def _documented(kind: Any) -> dict[str, str]:
    """Argument -> its description, from the ``Args:`` section of the docstring, whose entries are ``name: text`` or
    ``name, name: text``."""
    section = re.search(r"Args:\n(.*?)(?:\n\n|\Z)", inspect.cleandoc(kind.__doc__ or ""), re.DOTALL)
    entries = re.findall(r"^    ([\w, \n]+): (.*(?:\n     +.*)*)", section[1] if section else "", re.MULTILINE)
    return {
        name.strip(): " ".join(text.replace("%", "%%").split()) for names, text in entries for name in names.split(",")
    }


_PARSERS: dict[Any, Callable[[str], Any]] = {
    float: lambda text: None if text == "none" else float(Fraction(text)),
    int: lambda text: None if text == "none" else int(text),
    str: lambda text: None if text == "none" else text,
}


class Counted:
    """A stock Horovod compressor with the package's accounting. It also makes channels_last gradients contiguous, as
    Horovod requires, and restores their strides."""

    def __init__(self, stock: Any, ranks: int) -> None:
        self.stock, self.ranks, self.steps, self.pending = stock, ranks, 0, 0
        self.wire = WireStats()

    def compress(self, tensor: Tensor) -> tuple[Tensor, Any]:
        if self.pending == 0:
            self.wire.begin_step()
        start = time.perf_counter()
        payload, context = self.stock.compress(tensor.contiguous())
        self.wire.count_dense(tensor.numel(), payload.nbytes, self.ranks, per_node=1)
        self.pending += 1
        self.wire.count_seconds(time.perf_counter() - start)
        return payload, (context, None if tensor.is_contiguous() else tensor)

    def decompress(self, tensor: Tensor, context: Any) -> Tensor:
        start = time.perf_counter()
        context, restore = context
        result: Tensor = self.stock.decompress(tensor, context)
        if restore is not None:
            result = restore.copy_(result)
        self.pending -= 1
        self.wire.count_seconds(time.perf_counter() - start)
        if self.pending == 0:  # Horovod submits every gradient before it synchronizes the first
            self.wire.end_step()
            self.steps += 1
        return result

    def stats(self) -> dict[str, Any]:
        return {"steps": self.steps, **self.wire.report(), "residual_norm": 0.0}


@dataclass(frozen=True)
class Cast:
    """A compressor that sends gradients in a dtype; None: as they are."""

    dtype: torch.dtype | None

    def compress(self, tensor: Tensor) -> tuple[Tensor, torch.dtype]:
        return tensor.to(self.dtype or tensor.dtype), tensor.dtype

    def decompress(self, tensor: Tensor, context: torch.dtype) -> Tensor:
        return tensor.to(context)


#: What Horovod has as hvd.Compression, for ranks without Horovod.
STOCK = {"none": Cast(None), "fp16": Cast(torch.float16)}


class CountedHook(Counted):
    """Byte accounting of one of torch's own communication hooks; ``hook`` is for
    :meth:`hvd_compress.cli.ranks.Ddp.wrap`. Without a hook, DDP allreduces float32."""

    def __init__(self, method: str, model: torch.nn.Module, optimizer: torch.optim.Optimizer, ranks: int) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

        super().__init__(None, ranks)
        self.hook: Any = "fp16" if method == "fp16" else None
        if method == "ddp-powersgd":
            state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
            self.hook = state, powerSGD_hook.powerSGD_hook
        self.entries, self.saved = sum(local(p).numel() for p in model.parameters()), 0
        optimizer.register_step_post_hook(self._stepped)

    def _stepped(self, *_: Any) -> None:
        sent, saved = (2 if self.hook == "fp16" else 4) * self.entries, 0
        if isinstance(self.hook, tuple):
            _, before, after = self.hook[0].compression_stats()  # entries so far
            saved = 4 * (before - after)
        self.wire.begin_step()
        self.wire.count_dense(self.entries, sent - (saved - self.saved), self.ranks, per_node=1)
        self.wire.end_step()
        self.saved, self.steps = saved, self.steps + 1


METHODS: dict[str, Method] = {
    "none": Method(),
    "fp16": Method(hosts=("horovod", "ddp", "threads")),
    "ddp-powersgd": Method(hosts=("ddp",)),
    **{
        name.lower(): Method(kind, optimizer="plain" if kind is hvd_compress.DeMo else "sgd")
        for name, kind in vars(hvd_compress).items()
        if isinstance(kind, type) and issubclass(kind, hvd_compress.Compressor)
        if kind not in (hvd_compress.Compressor, hvd_compress.NoCompression)
    },
}


def method_and_host(label: str) -> tuple[str, str]:
    """The method and the host of a row such as ``iwp``, ``iwp@slow``, ``ddp-none`` or ``ddp-iwp``. ``ddp-powersgd`` is
    torch's own hook; hvd_compress.PowerSGD by DDP is ``ddp-hvd-powersgd``."""
    name = label.partition("@")[0]
    if name in METHODS:
        return name, METHODS[name].hosts[0]
    if name.startswith("ddp-") and (method := name.removeprefix("ddp-").removeprefix("hvd-")) in METHODS:
        return method, "ddp"
    raise ValueError(f"unknown method {name!r}; known: {', '.join(METHODS)}, and ddp-METHOD")
