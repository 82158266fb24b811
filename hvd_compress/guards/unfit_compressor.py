"""Compressors that do not fit local steps.

People: give local steps a compressor of gradients: one with momentum, `grad_scaler=` or signs, that has exchanged
    gradients, or that has local steps already.
Cost: residuals of gradients are taken for progress of weights, and momentum counts twice.
Noticed: when local steps are built.
Message: `this compressor has exchanged gradients`, `this compressor has local steps already`, `momentum and grad_scaler
    stay with the optimizer`, `local steps move the weights by averages, not by signs` …
Cure: a new compressor, with `momentum=0`, `sign=False` and no `grad_scaler=`; momentum stays in the optimizer

People: build local steps while hooks of `register_fsdp_hooks()` are on the model.
Cost: gradients are exchanged in every step, and local steps save nothing.
Message: `hooks of register_fsdp_hooks() exchange these parameters' gradients` …
Cure: `remove()` of the handle that it has returned
"""

import torch

from ..engine.engine import Engine
from ..engine.membership import Membership
from ..engine.shards import is_sharded
from ..engine.work import any_unsent
from .averaging import hooked
from .sharding import check_gradient_is_averaged, check_sharded


def check_compressor(engine: Engine, scaler: bool, unsent: str, restore_length: bool, delay: int) -> None:
    """Raises ``ValueError`` for a compressor unfit for local steps. ``scaler``: whether it has a GradScaler."""
    method, traits, members = engine.method, engine.method.traits, engine.collectives
    if method.has_clock and method.clock.takes_local_steps:
        raise ValueError("this compressor has local steps already: build a new compressor, with all optimizers")
    used = method.has_clock and not engine.parameters[0].is_meta
    if engine.step or (used and (engine.clock.collecting or any_unsent(engine.works))):
        raise ValueError(
            "this compressor has exchanged gradients, or loaded a state, and residuals of gradients are no progress of "
            "weights: build another one for LocalSteps"
        )
    if unsent == "weights" and engine.works and engine.nodes.inside is not None:
        raise ValueError('in nodes one rank keeps what was not sent, for all of its node: use unsent="buffer"')
    if traits.momentum or scaler:
        raise ValueError(
            "momentum and grad_scaler stay with the optimizer that takes the local steps: build the compressor "
            "with momentum=0 and without grad_scaler"
        )
    if restore_length and not traits.every_entry:
        raise ValueError(
            f"{type(method).__name__} sends few entries, whose length is not that of the differences: "
            "restore_length=True goes with compressors that send all, such as Quantized and NoCompression"
        )
    if traits.fixed_size:
        raise ValueError("local steps move the weights by averages, not by signs: build the compressor with sign=False")
    if unsent == "weights" and not traits.conserving:
        raise ValueError(
            "what stays in the weights is what was not sent: build the compressor with decay=1 and subtract=1, or "
            'use unsent="buffer"'
        )
    if delay and isinstance(members, Membership) and members.group_size > 1:
        # A rank whose exchange fails waits for the votes of its group, which would wait for it in a forward pass.
        raise ValueError(
            f"delay must be 0 with replica groups of several ranks ({members.group_size} here), got {delay}: all ranks "
            "of a group end a round in the same call of step()"
        )


def check_own_gradients(engine: Engine, model: torch.nn.Module | None) -> None:
    """Raises ``ValueError`` if gradients are averaged between the ranks, or not averaged in a shard group."""
    if model is not None:
        check_sharded(model)
    if hooked(engine.parameters):
        raise ValueError(
            "hooks of register_fsdp_hooks() exchange these parameters' gradients in every step: call remove() of "
            "the handle that it has returned"
        )
    for name, parameter in zip(engine.names, engine.parameters, strict=True):
        if is_sharded(parameter):
            check_gradient_is_averaged(name, parameter, True, engine.collectives)
