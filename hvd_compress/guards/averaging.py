"""Gradients that something else averages in each step: DistributedDataParallel, hooks, Horovod's optimizer.

People: call `average_gradients()` for a model in DistributedDataParallel.
Cost: gradients are averaged twice, first without compression.
Noticed: in the first call, DDP models of the process that hold the parameters are looked for.
Message: `DistributedDataParallel averages the gradients already` …
Cure: DDP's hook, `ddp_hook`, or `hvd_compress.trainers.local_gradients(ddp)`

People: wrap the model in DDP on a part of the ranks, and build the compressor without `process_group=`.
Cost: the compressor averages over everybody.
Noticed: in the first step, by the process group of the DDP model.
Message: `DistributedDataParallel averages over the ranks` …
Cure: the same `process_group=` for both
"""

import abc
from collections.abc import Iterable, Sequence, Set

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ..engine.optimizers import parameters_of
from .living import living


class ExchangingHook(abc.ABC):
    """The hook of a parameter by which a compressor exchanges its gradient."""

    @property
    @abc.abstractmethod
    def exchanges(self) -> bool:
        """Whether the compressor exists, and its hooks were not removed."""


class DDPState(abc.ABC):
    """The state of a communication hook of DistributedDataParallel that may leave each rank its own gradients."""

    @property
    @abc.abstractmethod
    def own(self) -> bool:
        """Whether it does."""

    @abc.abstractmethod
    def end(self) -> None:
        """Lets DDP average the gradients again."""


def averages(parameters: Sequence[Tensor]) -> str | None:
    """Names what averages the gradients of these parameters in each step, and the cure; None if nothing does."""
    ids = {id(p) for p in parameters}
    if hooked(parameters):
        return "the hooks of register_fsdp_hooks(): call remove() of the handle that it has returned"
    if any(map(ddp_averages, ddp_models(parameters))):
        return (
            "DistributedDataParallel (accelerate.prepare() and Lightning's ddp strategy make one): call "
            "hvd_compress.trainers.local_gradients(ddp), or train the plain model, ddp.module"
        )
    for optimizer in living(torch.optim.Optimizer):
        if is_distributed_optimizer(optimizer) and not ids.isdisjoint(parameters_of([optimizer])):
            return "Horovod's DistributedOptimizer: step the plain optimizer, and do not build it"
    return None


def hooked(parameters: Iterable[Tensor]) -> bool:
    """Whether the hooks of a compressor are registered on one of the parameters, and not removed."""
    hooks = (hook for p in parameters for hook in (getattr(p, "_post_accumulate_grad_hooks", None) or {}).values())
    return any(isinstance(hook, ExchangingHook) and hook.exchanges for hook in hooks)


def ddp_models(parameters: Iterable[Tensor]) -> list[DistributedDataParallel]:
    """The DDP models that hold one of the parameters, and do not ignore it."""
    ids = {id(p) for p in parameters}

    def holds(ddp: DistributedDataParallel) -> bool:
        return any(id(p) in ids for name, p in ddp.module.named_parameters() if name not in ddp.parameters_to_ignore)

    return [ddp for ddp in living(DistributedDataParallel) if holds(ddp)]


def hooked_models(state: object, parameters: Iterable[Tensor]) -> list[DistributedDataParallel]:
    """The DDP models whose hook has this state; if the user's own hook calls ours, those with a hook and one of the
    parameters. DDP does not tell a hook its model."""
    hooked = [ddp for ddp in living(DistributedDataParallel) if getattr(ddp, "_comm_hooks", ())]
    registered = [ddp for ddp in hooked if any(theirs is state for _, theirs in ddp._comm_hooks)]
    ids = {id(p) for p in parameters}
    return registered or [ddp for ddp in hooked if any(id(p) in ids for p in ddp.parameters())]


def check_ranks(theirs: Sequence[int], ours: Sequence[int]) -> None:
    """Raises ``ValueError`` for a DDP model of other ranks than the compressor's."""
    if theirs != ours:
        raise ValueError(
            f"DistributedDataParallel averages over the ranks {theirs}, and this compressor over {ours}: "
            "give both the same process_group="
        )


def refuse_ddp(parameters: Iterable[Tensor]) -> None:
    """Raises ``ValueError`` for parameters of a DDP model that averages gradients."""
    if any(map(ddp_averages, ddp_models(parameters))):
        raise ValueError(
            "DistributedDataParallel averages the gradients already: use its hook, ddp_hook, or call "
            "hvd_compress.trainers.local_gradients(ddp) (no_sync() is not enough)"
        )


def ddp_averages(ddp: DistributedDataParallel) -> bool:
    """Whether a DDP model averages gradients in its next backward pass."""
    own = any(isinstance(state, DDPState) and state.own for _, state in getattr(ddp, "_comm_hooks", ()))
    return ddp.require_backward_grad_sync and not own


def average_again(parameters: Iterable[Tensor], kept: Set[int]) -> None:
    """Ends what :func:`hvd_compress.trainers.local_gradients` has begun, for the DDP models that hold one of the
    parameters, and none with an id in ``kept``."""
    ended = {*map(id, parameters)} - kept
    for ddp in living(DistributedDataParallel):
        held = {*map(id, ddp.parameters())}
        for _, state in getattr(ddp, "_comm_hooks", ()) if held & ended and not held & kept else ():
            if isinstance(state, DDPState) and state.own:
                state.end()


def was_given(optimizer: Optimizer, compression: object) -> bool | None:
    """Whether Horovod's optimizer was given this compressor; None for another optimizer."""
    given = getattr(optimizer, "_compression", None)
    return None if given is None else given is compression


def is_distributed_optimizer(optimizer: Optimizer) -> bool:
    """Whether it is Horovod's."""
    return hasattr(optimizer, "_compression")
