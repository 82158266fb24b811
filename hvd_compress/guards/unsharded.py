"""An FSDP2 model whose parameters are not the shards, but gathered from them.

People: build a compressor, or register hooks, after a validation.
Cost: the compressor would average what FSDP throws away.
Noticed: FSDP's modules say whether they are sharded.
Message: `is unsharded, as after a forward pass`, `is not the shard that is trained` …
Cure: `model.reshard()` before, on all ranks
"""

import sys
from collections.abc import Iterable
from typing import Any

import torch


def sharded_modules(model: torch.nn.Module) -> list[tuple[str, Any]]:
    """The modules in a model that ``fully_shard()`` was applied to, with names. Imports no FSDP: it takes a second."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return []
    return [(name, module) for name, module in model.named_modules() if isinstance(module, fsdp.FSDPModule)]


def groups_of(module: Any) -> list[Any]:
    """A module's groups of parameters that FSDP reduces together: usually one, or none. Modules may share one."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    return [group for group in [state._fsdp_param_group] if group] if groups is None else list(groups)


def check_resharded(model: object) -> None:
    """Raises ``ValueError`` if a model's parameters are gathered from the shards. No model: does nothing."""
    if not isinstance(model, torch.nn.Module):
        return
    for name, module in sharded_modules(model):
        if not all(group.is_sharded for group in groups_of(module)):
            call = f"model.get_submodule({name!r}).reshard()" if name else "model.reshard()"
            raise ValueError(
                f"{name or 'the model'} is unsharded, as after a forward pass without a backward pass (a validation): "
                f"call {call} before, on all ranks"
            )


def check_not_unsharded(model: torch.nn.Module, named: Iterable[tuple[str, torch.nn.Parameter]]) -> None:
    """Raises ``ValueError`` if one of the parameters is a plain one, gathered by FSDP from the model's shards."""
    groups = [group for _, module in sharded_modules(model) for group in groups_of(module)]
    # FSDP makes each of them once and keeps it.
    unsharded = [getattr(param, "_unsharded_param", None) for group in groups for param in group.fsdp_params]
    ids = {id(parameter) for parameter in unsharded if parameter is not None}
    for name, parameter in named:
        if id(parameter) in ids:
            raise ValueError(
                f"{name}: is not the shard that is trained, but what FSDP has gathered of it for a forward pass: call "
                "model.reshard() before you build the compressor"
            )
