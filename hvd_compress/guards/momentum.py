"""Momentum in the compressor that would be lost, or counted twice.

People: give momentum to the optimizer and to the compressor; let a schedule (OneCycleLR) set it after
    `take_momentum()`.
Cost: momentum counts twice.
Noticed: before each step.
Message: `momentum would count twice: … in this compressor` …
Cure: `compression.take_momentum(optimizer)` in place of `momentum=`; `cycle_momentum=False` of the schedule

People: take the momentum with one process, of an optimizer with other parameters, or where Horovod was not given the
    compressor.
Cost: parameters train without momentum.
Message: `momentum would be lost`, `and would lose their momentum`, `this compressor has the momentum, but` …
Cure: all of the optimizer's named parameters for the compressor; `compression=` of Horovod's optimizer
"""

from typing import Any

from ..engine.facts import OptimizerFacts, momentum_of


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
