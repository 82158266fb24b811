"""The optimizers that take the local steps between two exchanges."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence, Set
from typing import Any

from torch.optim import Optimizer

from ..engine.optimizers import inside, parameters_of, share_parameters, unwrapped
from ..guards.averaging import is_distributed_optimizer

# After so many steps of an optimizer without LocalSteps.step(), and so many calls of that without a step of an
# optimizer, a warning says that something may have been forgotten.
_FORGOTTEN = 100


class LocalOptimizers:
    """One optimizer, or several of different parameters: for example ``torch.optim.Muon`` of matrices and AdamW of the
    rest.

    Args:
        given: by the user; those that Accelerate and Lightning wrap are taken out of their wrappers.
        known: the ids of the parameters that are averaged.
        warn: called with a warning.

    Raises:
        TypeError: not an optimizer, or a sequence of them.
        ValueError: none; Horovod's; and see :meth:`check`.
    """

    def __init__(self, given: Optimizer | Sequence[Optimizer], known: Set[int], warn: Callable[[str], None]) -> None:
        #: Without wrappers.
        self.all = [_plain(optimizer) for optimizer in _listed(given)]
        self._own, self._known, self._warn = set(self.all), known, warn
        # Since the last call of LocalSteps.step(), and of those that have stepped before it.
        self._steps, self._last = Counter[Optimizer](), frozenset[Optimizer]()
        self._calls = 0
        if not self.all:
            raise ValueError("local steps need an optimizer, got an empty list")
        self.check()

    def check(self) -> None:
        """Raises ``ValueError`` if an optimizer holds no known parameter or a trained unknown one, or two hold the
        same."""
        holders = Counter[int]()
        for optimizer in self.all:
            for part in inside(optimizer):
                if callable(getattr(part, "eval", None)):
                    raise ValueError(
                        f"{type(part).__name__} evaluates other weights than it trains (optimizer.eval()), which local "
                        "steps do not average: use an optimizer with a learning-rate schedule, or gradients that are "
                        "averaged in each step, by a compressor"
                    )
            held = [p for group in optimizer.param_groups for p in group["params"]]
            if not any(id(p) in self._known for p in held):
                which = type(optimizer).__name__ if len(self.all) > 1 else "the optimizer"
                raise ValueError(f"{which} holds none of the compressor's parameters")
            if unknown := sum(p.requires_grad and id(p) not in self._known for p in held):
                raise ValueError(
                    f"{unknown} of the optimizer's parameters would never be averaged: the compressor was not given "
                    "them, or they were frozen when LocalSteps was built. Build both while all are trained, and freeze "
                    "layers after that; or end these local steps when layers are unfrozen, and build new ones"
                )
            holders.update(parameters_of([optimizer]))
        if shared := sum(count > 1 for count in holders.values()):
            raise ValueError(f"{shared} parameters are held by two of the optimizers: each one by a single optimizer")

    @property
    def held(self) -> set[int]:
        """The ids of the parameters that they hold."""
        return parameters_of(self.all)

    def given(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer was given here, or is one that wraps one of these."""
        return optimizer in self._own or any(share_parameters(optimizer, own) for own in self.all)

    def stepping(self, optimizer: Optimizer) -> int:
        """Called before each step of one of them. Returns its steps since the last call of LocalSteps.step(), and warns
        if that is forgotten."""
        self._steps[optimizer] += 1
        if self._steps[optimizer] == _FORGOTTEN:
            self._warn(f"{_FORGOTTEN} optimizer steps without LocalSteps.step(): call it after each one")
        return self._steps[optimizer]

    def may_change(self, optimizer: Optimizer) -> Set[int]:
        """The ids of the known parameters that no other optimizer holds."""
        return self._known - parameters_of(other for other in self.all if other is not optimizer)

    def counted(self) -> None:
        """Called by LocalSteps.step(): the steps so far belong to it. Warns if they cannot be meant so."""
        stepped = frozenset(self._steps)
        self._steps.clear()
        self._calls = 0 if stepped else self._calls + 1
        if self._calls == _FORGOTTEN:
            self._warn(
                f"{_FORGOTTEN} calls of LocalSteps.step() without a step of the optimizers that it was given: does "
                "another optimizer train the model, or has the model other parameters now?"
            )
        if stepped and self._last and stepped.isdisjoint(self._last):
            self._warn(
                "LocalSteps.step() was called after one optimizer and after another one, and counts each call: after "
                "several optimizers, call it once"
            )
        self._last = stepped or self._last


def _listed(given: Any) -> list[Any]:
    if hasattr(given, "param_groups") or not isinstance(given, Iterable):
        return [given]
    return list(given)


def _plain(optimizer: Any) -> Optimizer:
    found = unwrapped(optimizer)
    if not isinstance(found, Optimizer):
        raise TypeError(
            f"optimizer must be a torch.optim.Optimizer, or a list of several, got {optimizer!r:.80}: write "
            "LocalSteps(compression, [first, second], period)"
        )
    if hasattr(found, "manager"):
        raise ValueError(
            "torchft's OptimizerWrapper votes on each step, and local steps vote on each round: give and step the "
            "optimizer inside it"
        )
    if is_distributed_optimizer(found):
        raise ValueError("local steps take the plain optimizer, not Horovod's: nothing averages the gradients")
    return found
