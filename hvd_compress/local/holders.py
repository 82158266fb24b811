"""The modules of FSDP2 that gather the parameters of local steps."""

import sys
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from ..engine.shards import is_sharded
from ..guards.living import living
from ..guards.unsharded import sharded_modules


class Holders:
    """FSDP2's modules that hold the parameters. Keeps no strong reference.

    Args:
        named: names and parameters.
        model: the model that has them, if it is known. Otherwise, and for parameters that a module around it has
            sharded, the modules are looked for in the process.
    """

    def __init__(self, named: Sequence[tuple[str, Tensor]], model: torch.nn.Module | None) -> None:
        inside = [] if model is None else [module for _, module in sharded_modules(model)]
        held = {id(p) for module in inside for p in module.parameters()}
        ids, fsdp = {id(p) for _, p in named if is_sharded(p)} - held, sys.modules.get("torch.distributed.fsdp")
        found = living(fsdp.FSDPModule) if ids and fsdp is not None else []
        others = [module for module in found if any(id(p) in ids for p in module.parameters())]
        self._sharded = [weakref.ref(module) for module in (*inside, *others)]

    def reshard(self) -> None:
        """Drops the parameters that FSDP2 has gathered, as in a validation: after an exchange they are old."""
        for module in self._sharded:
            if (alive := module()) is not None:
                alive.reshard()
