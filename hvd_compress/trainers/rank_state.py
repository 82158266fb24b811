"""The state of one rank in local steps that a trainer's checkpoint, which is rank 0's, does not contain."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map, tree_map_only

from ..checkpoints.dcp import whole
from ..engine.modes import modes_off
from ..engine.shards import is_sharded, local

# The key of a tensor that is not on the CPU, or is a shard.
_MARK = "hvd_compress: tensor"


@modes_off
def save(model: torch.nn.Module, optimizers: Sequence[Optimizer], scaler: Any) -> dict[str, Any]:
    """Parameters, buffers, states of optimizers and scaler: copies on the CPU; of DTensors, this rank's shards."""
    return {
        "parameters": {name: _copy(p) for name, p in model.named_parameters() if p.requires_grad},
        "buffers": {name: _copy(buffer) for name, buffer in model.named_buffers()},
        "optimizers": [_saved(optimizer) for optimizer in optimizers],
        "scaler": None if scaler is None else scaler.state_dict(),
    }


@modes_off
def load(state: dict[str, Any], model: torch.nn.Module, optimizers: Sequence[Optimizer], scaler: Any) -> None:
    """Writes the result of :func:`save`. Raises ``ValueError`` if the model or the optimizers are others."""
    found: dict[str, dict[str, Tensor]] = {
        "parameters": dict(model.named_parameters()),
        "buffers": dict(model.named_buffers()),
    }
    for kind, tensors in found.items():
        _check_names(kind, state[kind], tensors)
        for name, saved in state[kind].items():
            local(tensors[name]).copy_(saved)
    if len(state["optimizers"]) != len(optimizers):
        raise ValueError(f"the checkpoint has {len(state['optimizers'])} optimizers, this training {len(optimizers)}")
    for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(_loaded(saved, optimizer))
    if scaler is not None and state["scaler"] is not None:
        scaler.load_state_dict(state["scaler"])


def _check_names(kind: str, saved: dict[str, Tensor], here: dict[str, Tensor]) -> None:
    for name, tensor in saved.items():
        if name not in here or local(here[name]).shape != tensor.shape:
            got = tuple(local(here[name]).shape) if name in here else "none"
            raise ValueError(
                f"{kind}.{name}: the checkpoint has the shape {tuple(tensor.shape)}, this model {got}: resume with the "
                "model that was saved"
            )


def _copy(tensor: Tensor) -> Tensor:
    return local(tensor).detach().to("cpu", copy=True)


def _saved(optimizer: Optimizer) -> Any:
    """An optimizer's state, of any form. Tensors that are not on the CPU, and DTensors, are marked as such."""
    held = _held(optimizer)

    def copied(value: Tensor) -> Any:
        like = None
        if is_sharded(value):
            like = next((n for n, p in enumerate(held) if is_sharded(p) and _layout(p) == _layout(value)), None)
            if like is None:
                raise ValueError(f"{type(optimizer).__name__} has a state that is not sharded as any of its parameters")
        return _copy(value) if local(value).is_cpu and like is None else {_MARK: _copy(value), "like": like}

    return tree_map_only(Tensor, copied, optimizer.state_dict())


def _loaded(state: Any, optimizer: Optimizer) -> Any:
    """Returns the ``optimizer.state_dict()`` that :func:`_saved` has saved."""
    held = _held(optimizer)

    def marked(value: Any) -> bool:
        return isinstance(value, dict) and _MARK in value

    def restored(value: Any) -> Any:
        if not marked(value):
            return value
        like = held[value["like"] or 0]
        tensor = value[_MARK].to(local(like).device)
        return tensor if value["like"] is None else whole(tensor, like)

    return tree_map(restored, state, is_leaf=marked)


def _held(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _layout(tensor: Any) -> Any:
    return tensor.device_mesh, tensor.placements, tensor.shape
