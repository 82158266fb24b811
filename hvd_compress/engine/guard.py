"""Whether an optimizer fits the compressor whose averages it applies."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch.optim import Adam, Optimizer


@dataclass(frozen=True)
class Traits:
    """What a method makes of gradients, as far as others have to know.

    ``linear``: everything that is passed in is applied once, without a memory of what was applied: an average that
    comes back as a part of the next gradient is then neither lost nor counted twice. ``signs``: averages are replaced
    by their signs, or by what else has a size of its own. ``sparse``: a step's averages are mostly zeros. ``momentum``:
    gradients pass through a momentum first, in [0, 1). ``exact``: the residual is what has not been sent,
    no more and no less.
    """

    linear: bool = True
    signs: bool = False
    sparse: bool = False
    momentum: float = 0.0
    exact: bool = True


@dataclass(frozen=True)
class Facts:
    """Of an optimizer that is about to step parameters of a compressor.

    ``given``: whether Horovod's optimizer was given this compressor; None if it is not Horovod's. ``ours``: whether
    the gradients that it applies have come from this compressor. ``active``: whether this process exchanges gradients
    at all. ``local``: whether it takes local steps. ``unknown``: how many of its trained parameters the compressor was
    not given.
    """

    optimizer: Optimizer
    given: bool | None
    ours: bool
    active: bool
    local: bool
    unknown: int

    @property
    def momentum(self) -> float:
        """That of the first parameter group that has one."""
        return next(filter(None, map(momentum_of, self.optimizer.param_groups)), 0.0)


def momentum_of(group: Mapping[str, Any]) -> float:
    """The momentum of an optimizer's parameter group, or its first beta."""
    return group.get("momentum") or (group.get("betas") or (0.0,))[0]


def check(facts: Facts, traits: Traits, warn: Callable[[str], None]) -> None:
    """Raises ``ValueError`` if the optimizer must not apply such averages, and warns of what trains badly."""
    if traits.signs and not facts.local:
        _check_takes_signs(facts)
    if facts.ours and facts.unknown:
        warn(
            f"{facts.unknown} of the optimizer's parameters were not given to this compressor: their gradients are "
            "sent uncompressed, and stats() does not count them"
        )
    if traits.sparse and isinstance(facts.optimizer, Adam) and not facts.local:
        warn(
            "Adam trains badly on sparse gradients: an entry that has waited arrives as one burst, and Adam scales its "
            "steps by bursts (docs/choosing.md); use hvd_compress.DeMo with torch.optim.SGD, or "
            "hvd_compress.LocalSteps, which keeps Adam"
        )


def _check_takes_signs(facts: Facts) -> None:
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
    if facts.momentum:
        raise ValueError(
            f"momentum would count twice: DeMo has one of its own, and {type(facts.optimizer).__name__} one of "
            f"{facts.momentum:g}; use torch.optim.SGD(parameters, lr, weight_decay=...) without momentum, with the "
            "learning rate of AdamW"
        )


def check_momentum(facts: Facts, momentum: float, owing: bool) -> None:
    """Raises ``ValueError`` if the compressor's ``momentum`` would be lost or counted twice. ``owing``: whether it
    belongs to parameters that the optimizer holds."""
    if facts.given is False:
        raise ValueError(
            "this compressor has the momentum, but DistributedOptimizer was not given it: pass compression="
        )
    if not facts.active:
        raise ValueError(
            "momentum would be lost: with one process, Horovod calls no compressor; give it to the optimizer, set "
            "momentum=0 here, and call compression.take_momentum(optimizer), which then leaves it there"
        )
    if owing and facts.ours:
        check_complete(facts.unknown)


def check_complete(unknown: int) -> None:
    """Raises ``ValueError`` if parameters of an optimizer would lose their momentum."""
    if unknown:
        raise ValueError(
            f"{unknown} of the optimizer's parameters were not given to this compressor and would lose their "
            "momentum: give it all of the optimizer's named parameters"
        )
