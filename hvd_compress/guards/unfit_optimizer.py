"""Optimizers that do not fit local steps.

People: step an optimizer that local steps were not given, in another training of the model or after building it anew;
    step Horovod's; give `ZeroRedundancyOptimizer`.
Cost: its steps are averaged as progress of the others, or gradients are averaged twice.
Noticed: before each step of any optimizer that holds the parameters.
Message: `steps parameters of this compressor, and LocalSteps was not given it`, `sends weights in each step` …
Cure: all optimizers as a list, plain ones; [`local.end(model)`](local_steps.md) on all ranks before another training

People: freeze layers before local steps are built, and unfreeze them later; add parameters to an optimizer.
Cost: these parameters are never averaged: each rank trains its own.
Noticed: when local steps are built, and before each exchange.
Message: `of the optimizer's parameters would never be averaged` …
Cure: build the compressor and `LocalSteps` while all layers are trained; or `end()` and new ones

People: use schedule-free optimizers.
Cost: ranks evaluate weights that are not averaged.
Noticed: when local steps are built: the optimizer has `eval()`.
Message: `evaluates other weights than it trains` …
Cure: a learning-rate schedule, or a compressor of each step's gradients
"""

from collections import Counter
from collections.abc import Sequence, Set
from typing import Any, NoReturn

from torch.optim import Optimizer

from ..engine.optimizers import parameters_of
from ..engine.wrappers import inside
from .averaging import is_distributed_optimizer

END = (
    "If the training by local steps is over, call local.end(model) on all ranks before another one (or drop the "
    "compressor, if local was dropped)"
)


def check_kind(optimizer: Any, given: Any) -> None:
    """Raises ``TypeError`` for no optimizer, ``ValueError`` for torchft's and Horovod's. ``given``: with wrappers."""
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"optimizer must be a torch.optim.Optimizer, or a list of several, got {given!r:.80}: write "
            "LocalSteps(compression, [first, second], period)"
        )
    if hasattr(optimizer, "manager"):
        raise ValueError(
            "torchft's OptimizerWrapper votes on each step, and local steps vote on each round: give and step the "
            "optimizer inside it"
        )
    if is_distributed_optimizer(optimizer):
        raise ValueError("local steps take the plain optimizer, not Horovod's: nothing averages the gradients")


def check_averaged(optimizer: Optimizer, apart: bool) -> list[Optimizer]:
    """Returns an optimizer on averaged gradients, or those in a container of several. Raises ``ValueError`` for one
    that has another one and a state of its own (SAM, Lookahead), for one whose step cannot stand for several, and for
    one that may gather shards of matrices, which are ``apart``: a fragment has other ones on each rank of the group."""
    parts = inside(optimizer)
    if optimizer in parts and len(parts) > 1:
        raise ValueError(f"on_averaged_gradients takes plain optimizers; {type(optimizer).__name__} has another inside")
    # Their states are no moving averages, or their own schedules; they take closures, or sparse gradients only.
    unfit = {"ASGD", "Adadelta", "Adafactor", "Adagrad", "LBFGS", "NAdam", "RAdam", "Rprop", "SparseAdam"}
    for part in parts:
        kinds = {c.__name__ for c in type(part).__mro__}
        sums_quotients = any(group.get("momentum") and "centered" in group for group in part.param_groups)
        if sums_quotients or kinds & unfit:
            raise ValueError(
                f"on_averaged_gradients: one step of {type(part).__name__} cannot stand for several; take SGD, RMSprop "
                "without momentum, Adam, AdamW, Adamax or Muon, or let it take local steps"
            )
        if apart and kinds.isdisjoint({"SGD", "RMSprop", "Adam", "Adamax"}):
            raise ValueError(
                f"{type(part).__name__} of on_averaged_gradients may need whole matrices, and the ranks of a shard "
                "group have shards of unequal size in different fragments: use fragments=1"
            )
    return parts


def check_parameters(optimizers: Sequence[Optimizer], known: Set[int]) -> None:
    """Raises ``ValueError`` if there is no optimizer, one holds no known parameter or a trained unknown one, or two
    hold the same. ``known``: the ids of the parameters that are averaged."""
    if not optimizers:
        raise ValueError("local steps need an optimizer, got an empty list")
    holders = Counter[int]()
    for optimizer in optimizers:
        for part in inside(optimizer):
            if hasattr(part, "consolidate_state_dict"):
                raise ValueError(
                    f"{type(part).__name__} sends weights in each step: give and step the optimizer inside it"
                )
            if callable(getattr(part, "eval", None)):
                raise ValueError(
                    f"{type(part).__name__} evaluates other weights than it trains (optimizer.eval()), which local "
                    "steps do not average: use an optimizer with a learning-rate schedule, or gradients that are "
                    "averaged in each step, by a compressor"
                )
        held = [p for group in optimizer.param_groups for p in group["params"]]
        if not any(id(p) in known for p in held):
            raise ValueError(f"{type(optimizer).__name__} holds none of the compressor's parameters")
        if unknown := sum(p.requires_grad and id(p) not in known for p in held):
            raise ValueError(
                f"{unknown} of the optimizer's parameters would never be averaged: the compressor was not given "
                "them, or they were frozen when LocalSteps was built. Build both while all are trained, and freeze "
                "layers after that; or end these local steps when layers are unfrozen, and build new ones"
            )
        holders.update(parameters_of([optimizer]))
    if shared := sum(count > 1 for count in holders.values()):
        raise ValueError(f"{shared} parameters are held by two of the optimizers: each one by a single optimizer")


def refuse_other(optimizer: Optimizer) -> NoReturn:
    """Raises ``ValueError``: no local steps were given this optimizer."""
    raise ValueError(
        f"{type(optimizer).__name__} steps parameters of this compressor, and LocalSteps was not given it: "
        f"build LocalSteps(compression, [first, second], period) with all optimizers. {END}"
    )


def refuse_distributed(optimizer: Optimizer) -> None:
    """Raises ``ValueError`` for Horovod's optimizer."""
    if is_distributed_optimizer(optimizer):
        raise ValueError(
            "Horovod's DistributedOptimizer averages the gradients in every step, and LocalSteps exchanges weights "
            f"beside that, which saves nothing: step the plain optimizer. {END}"
        )
