"""Gradients of sharded parameters that would not be averaged over all ranks, or twice over some.

People: give `fully_shard()` a 2-D mesh, or the compressor `nodes=` or no `process_group=`.
Cost: FSDP averages over all ranks without compression, and the compressor does it again.
Noticed: by the meshes, when hooks are registered or local steps built.
Message: `without compression, and the compressor over` …
Cure: the 1-D `mesh["shard"]` for `fully_shard()`, and the group of the replicas as `process_group=`
    ([FSDP2](nodes.md))

People: leave parameters out of `fully_shard()`, or build the compressor before it.
Cost: they are not averaged, and the replicas drift apart.
Message: `is not sharded, so its gradient would not be averaged`, `is not this compressor's, so its gradient would not
    be averaged` …
Cure: every trained parameter inside a module that is sharded, and the compressor after `fully_shard()`
"""

from typing import Any, cast

import torch
from torch import Tensor

from ..engine.collectives import Collectives
from ..engine.shards import is_sharded
from .unsharded import check_resharded, sharded_modules


def check_sharded(model: torch.nn.Module) -> None:
    """Raises ``ValueError`` if an FSDP2 model is unsharded, or has a trained parameter that is not sharded. Does
    nothing for a model of which no module is sharded."""
    check_resharded(model)
    for name, p in model.named_parameters() if sharded_modules(model) else ():
        if p.requires_grad:
            check_is_sharded(name, p)


def check_is_sharded(name: str, parameter: Tensor) -> None:
    if not is_sharded(parameter):
        raise ValueError(
            f"{name}: is not sharded, so its gradient would not be averaged (ignored_params=, or a module outside "
            "of fully_shard()?)"
        )


def check_gradient_is_averaged(name: str, parameter: Tensor, ours: bool, between: Collectives) -> None:
    """Raises ``ValueError`` unless FSDP averages the gradient inside the shard group and the compressor ``between`` the
    replicas. ``ours``: whether the compressor has the parameter."""
    check_is_sharded(name, parameter)
    if not ours:
        raise ValueError(
            f"{name}: is not this compressor's, so its gradient would not be averaged between the replicas: give "
            "the compressor the model after fully_shard() and to_empty()"
        )
    ranks = getattr(between, "ranks", ())  # of torch.distributed
    sharded = cast(Any, parameter).device_mesh.mesh.flatten().tolist()
    if len({*ranks} & {*sharded}) > 1:
        raise ValueError(
            f"{name}: FSDP averages its gradient over the ranks {sharded} without compression, and the compressor "
            f"over {ranks}: give fully_shard() the 1-D mesh['shard'] of a mesh with the dimensions replicate and "
            "shard, and the compressor process_group=mesh.get_group('replicate') and no nodes="
        )
