"""Optimizers that do not fit the compressor whose averages they apply.

People: use DeMo with an optimizer that has momentum, that Horovod was not given the compressor for, in one process, or
    of parameters that the compressor does not have.
Cost: momentum counts twice, or plain averages are applied at a sign's learning rate.
Noticed: before each step.
Message: `momentum would count twice: DeMo has one of its own`, `its gradients are not signs`, `so the gradients are not
    signs`, `so their gradients are not signs` …
Cure: `torch.optim.SGD` without momentum, of exactly the parameters of the compressor; AdamW in one process

People: give momentum to the optimizer and to the compressor; let a schedule (OneCycleLR) set it after
    `take_momentum()`.
Cost: momentum counts twice.
Message: `momentum would count twice: … in this compressor` …
Cure: `compression.take_momentum(optimizer)` in place of `momentum=`; `cycle_momentum=False` of the schedule

People: take the momentum with one process, of an optimizer with other parameters, or where Horovod was not given the
    compressor.
Cost: parameters train without momentum.
Message: `momentum would be lost`, `and would lose their momentum`, `this compressor has the momentum, but` …
Cure: all of the optimizer's named parameters for the compressor; `compression=` of Horovod's optimizer

People: use Adam with a method that sends few entries in a step.
Cost: it trains badly: an entry that has waited arrives as one burst.
Message: `Adam trains badly on sparse gradients` …
Cure: DeMo with `torch.optim.SGD`, or [local steps](local_steps.md), which keep Adam; see [choosing](choosing.md)

People: build the compressor from a copy of the model that is trained, or from a part of it.
Cost: gradients are sent uncompressed, and `stats()` does not count them.
Message: `this optimizer holds none of its compressor's parameters`, `were not given to this compressor: their gradients
    are sent uncompressed` …
Cure: all named parameters of the model that is trained
"""

from collections.abc import Callable, Iterable
from typing import Any

from torch.optim import Adam

from ..engine.facts import OptimizerFacts, Traits, momentum_of


def check_optimizer(facts: OptimizerFacts, traits: Traits, warn: Callable[[str], None]) -> None:
    """Warns if the optimizer trains badly on averages with these traits."""
    if facts.ours and facts.unknown:
        warn(
            f"{facts.unknown} of the optimizer's parameters were not given to this compressor: their gradients are "
            "sent uncompressed, and stats() does not count them"
        )
    if traits.sparse and isinstance(facts.optimizer, Adam):
        warn(
            "Adam trains badly on sparse gradients: an entry that has waited arrives as one burst, and Adam scales its "
            "steps by bursts (docs/choosing.md); use hvd_compress.DeMo with torch.optim.SGD, or "
            "hvd_compress.LocalSteps, which keeps Adam"
        )


def check_fixed_size(facts: OptimizerFacts) -> None:
    """Raises ``ValueError`` if the optimizer must not apply averages of fixed size (signs, orthogonal matrices)."""
    if facts.given is False:
        raise ValueError(
            "DistributedOptimizer was not given this compressor, so its gradients are not signs: pass compression="
        )
    if not facts.active:
        raise ValueError(
            "with one process, or outside the process set, Horovod calls no compressor, so the gradients are not "
            "signs: use AdamW there"
        )
    if facts.ours and facts.unknown:
        raise ValueError(
            f"{facts.unknown} of the optimizer's parameters were not given to this compressor, so their gradients are "
            "not signs: give it all of the optimizer's named parameters"
        )
    check_passed(facts.bypassing(), "is not a sign")
    if facts.momentum:
        raise ValueError(
            f"momentum would count twice: DeMo has one of its own, and {type(facts.optimizer).__name__} one of "
            f"{facts.momentum:g}; use torch.optim.SGD(parameters, lr, weight_decay=...) without momentum, with the "
            "learning rate of AdamW"
        )


def check_momentum(facts: OptimizerFacts, value: float, groups: list[dict[str, Any]]) -> None:
    """Raises ``ValueError`` if momentum that is in the compressor, its ``value``, would be lost or counted twice.
    ``groups``: of the optimizer, with parameters that have it."""
    if facts.given is False:
        raise ValueError(
            "this compressor has the momentum, but DistributedOptimizer was not given it: pass compression="
        )
    if not facts.active:
        raise ValueError(
            "momentum would be lost: with one process, Horovod calls no compressor; give it to the optimizer, set "
            "momentum=0 here, and call compression.take_momentum(optimizer), which then leaves it there"
        )
    if groups and facts.ours:
        check_complete(facts.unknown)
    for group in groups:
        if own := momentum_of(group):
            raise ValueError(
                f"momentum would count twice: {value:g} in this compressor and {own:g} in "
                f"{type(facts.optimizer).__name__}; set the optimizer's to 0, or call "
                "compression.take_momentum(optimizer) before training instead of momentum="
            )


def check_complete(unknown: int) -> None:
    """Raises ``ValueError`` if parameters of an optimizer would lose their momentum."""
    if unknown:
        raise ValueError(
            f"{unknown} of the optimizer's parameters were not given to this compressor and would lose their "
            "momentum: give it all of the optimizer's named parameters"
        )


def check_holds_some(given: bool | None) -> None:
    """Raises ``ValueError`` for Horovod's optimizer of a compressor, of whose parameters it holds none."""
    if given:
        raise ValueError(
            "this optimizer holds none of its compressor's parameters; build the compressor from the named "
            "parameters of the model that is trained (not of one that was copied afterwards)"
        )


def check_passed(bypassing: Iterable[str], what: str) -> None:
    """Raises ``ValueError`` for the first of some parameters whose gradients have bypassed the compressor."""
    for name in bypassing:
        raise ValueError(
            f"{name}: its gradient has not passed through this compressor, and {what}. If it was unfrozen after the "
            "model was wrapped, wrap the model again; if DistributedDataParallel ignores it, give it to an optimizer "
            "of its own, and not to the compressor"
        )
