"""Whether an optimizer fits the compressor whose averages it applies."""

from collections.abc import Callable, Iterable

from torch.optim import Adam

from ..engine.facts import OptimizerFacts, Traits


def check(facts: OptimizerFacts, traits: Traits, warn: Callable[[str], None]) -> None:
    """Raises ``ValueError`` if the optimizer must not apply averages with these traits, and warns if it trains badly on
    them."""
    if traits.fixed_size:
        _check_fixed_size(facts)
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


def _check_fixed_size(facts: OptimizerFacts) -> None:
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


def check_momentum(facts: OptimizerFacts, holds: bool) -> None:
    """Raises ``ValueError`` if momentum that is in the compressor would be lost. ``holds``: whether the optimizer holds
    parameters that have it."""
    if facts.given is False:
        raise ValueError(
            "this compressor has the momentum, but DistributedOptimizer was not given it: pass compression="
        )
    if not facts.active:
        raise ValueError(
            "momentum would be lost: with one process, Horovod calls no compressor; give it to the optimizer, set "
            "momentum=0 here, and call compression.take_momentum(optimizer), which then leaves it there"
        )
    if holds and facts.ours:
        check_complete(facts.unknown)


def check_passed(bypassing: Iterable[str], what: str) -> None:
    """Raises ``ValueError`` for the first of some parameters whose gradients have bypassed the compressor."""
    for name in bypassing:
        raise ValueError(
            f"{name}: its gradient has not passed through this compressor, and {what}. If it was unfrozen after the "
            "model was wrapped, wrap the model again; if DistributedDataParallel ignores it, give it to an optimizer "
            "of its own, and not to the compressor"
        )


def check_complete(unknown: int) -> None:
    """Raises ``ValueError`` if parameters of an optimizer would lose their momentum."""
    if unknown:
        raise ValueError(
            f"{unknown} of the optimizer's parameters were not given to this compressor and would lose their "
            "momentum: give it all of the optimizer's named parameters"
        )
