"""The modules that hold the parameters of local steps."""

import sys
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..engine.shards import is_sharded
from ..guards.living import living
from ..guards.unsharded import sharded_modules


class Holders:
    """The modules that hold the parameters. Keeps no strong reference.

    Args:
        named: names and parameters.
        model: the model that has them, if it is known.
    """

    def __init__(self, named: Sequence[tuple[str, Tensor]], model: torch.nn.Module | None) -> None:
        # Not sharded ones: FSDP2 replaces its modules' parameters by gathered ones, and back.
        names = {id(p): name for name, p in named if not is_sharded(p)}
        modules = model.modules() if model is not None else ()
        self._model = None if model is None else weakref.ref(model)
        self._places = [
            (names[id(p)], weakref.ref(module), key, weakref.ref(p))
            for module in modules
            for key, p in module._parameters.items()
            if p is not None and id(p) in names
        ]
        inside = [module for _, module in sharded_modules(model)] if model is not None else []
        self._sharded = [weakref.ref(module) for module in dict.fromkeys([*inside, *_fsdp_modules(named)])]

    def check(self) -> None:
        """Raises ``ValueError`` if parameters of the model were replaced."""
        moved = [(name, p()) for name, module, key, p in self._places if not _holds(module(), key, p())]
        if not moved:
            return
        model = None if self._model is None else self._model()
        held = {id(p) for p in model.parameters()} if model is not None else set[int]()  # a parametrization moves some
        gone = [name for name, p in moved if id(p) not in held]
        if gone:
            more = f" and {len(gone) - 3} more" if len(gone) > 3 else ""
            raise ValueError(
                f"{', '.join(gone[:3])}{more}: the model has other parameters than the compressor was given "
                "(load_state_dict(assign=True), fully_shard() or a new layer after it was built?): build the "
                "compressor, the optimizer and LocalSteps after that"
            )

    def reshard(self) -> None:
        """Drops the parameters that FSDP2 has gathered, as in a validation: after an exchange they are old."""
        for module in self._sharded:
            if (alive := module()) is not None:
                alive.reshard()


def _holds(module: torch.nn.Module | None, key: str, parameter: Tensor | None) -> bool:
    return module is not None and module._parameters.get(key) is parameter


def _fsdp_modules(named: Sequence[tuple[str, Tensor]]) -> Iterator[Any]:
    """FSDP2's modules in this process that hold some of the parameters, themselves or in a module inside."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    ids = {id(p) for _, p in named if is_sharded(p)}
    if fsdp is None or not ids:
        return
    for module in living(fsdp.FSDPModule):
        if any(id(p) in ids for p in module.parameters()):
            yield module
