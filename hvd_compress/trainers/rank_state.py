"""What belongs to one rank in local steps, and is not in a trainer's checkpoint, which has that of rank 0."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..engine.modes import modes_off
from ..engine.shards import local, whole


@modes_off
def save(model: torch.nn.Module, optimizers: Sequence[Optimizer], scaler: Any) -> dict[str, Any]:
    """Trained parameters, buffers, the optimizers' states, the scaler's: copies on the CPU, of DTensors this rank's
    shards."""
    return {
        "parameters": {name: _copy(p) for name, p in model.named_parameters() if p.requires_grad},
        "buffers": {name: _copy(buffer) for name, buffer in model.named_buffers()},
        "optimizers": [_copies(optimizer.state_dict()) for optimizer in optimizers],
        "scaler": None if scaler is None else scaler.state_dict(),
    }


@modes_off
def load(state: dict[str, Any], model: torch.nn.Module, optimizers: Sequence[Optimizer], scaler: Any) -> None:
    """Writes what :func:`save` has returned. Raises ``ValueError`` if the model or the optimizers are others."""
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
        optimizer.load_state_dict(_sharded(saved, optimizer))
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


def _copies(value: Any) -> Any:
    """Nested values with copies of their tensors."""
    return _mapped(value, _copy)


def _mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: _mapped(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_mapped(item, change) for item in value)
    return value


def _sharded(state: dict[str, Any], optimizer: Optimizer) -> dict[str, Any]:
    """An optimizer's saved state with DTensors where its parameters are some."""
    held = [p for group in optimizer.param_groups for p in group["params"]]

    def divided(number: int) -> Any:
        shard = local(parameter := held[number])
        return _mapped(
            state["state"][number],
            lambda t: whole(t.to(shard.device), parameter) if t.shape == shard.shape else t,
        )

    return {**state, "state": {number: divided(number) for number in state["state"]}}
