"""Weights that drift apart although the averages are equal, under hooks, loops and Horovod.

People: clip by a norm to which a rank's own gradients belong, skip a step on one rank, do not broadcast the weights, or
    give the ranks other learning rates or optimizer states.
Cost: each rank trains another model, without a word.
Noticed: at step 0, 1, 10 and multiples of 100, sums and norms of some weights are compared. A warning on all ranks.
Message: `the ranks' weights differ, such as` …
Cure: broadcast weights and optimizer states before the first step; do the same on all ranks, except the data.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..engine.collectives import Handle, allgather
from ..engine.dense import as_real
from ..engine.engine import Engine
from ..engine.shards import local
from ..engine.spread import spread

# The most parameters that are looked at.
_PROBES = 16
# Steps between two looks, after those at the first ones.
_INTERVAL, _FIRST = 100, (1, 10)
# Entries that are looked at at a time.
_PART = 2**20
# How far a parameter's sum and norm may be apart, in norms: unequal devices round differently.
_TOLERANCE = 1e-3


class SameWeights:
    """Compares the ranks' weights in some steps, while the gradients are exchanged. Warns on all ranks if they differ:
    the sum or the norm of one of 16 parameters by a thousandth of its norm, or NaN on some ranks only."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        floating = [number for number, p in enumerate(engine.parameters) if p.is_floating_point() or p.is_complex()]
        self._numbers = spread(floating, _PROBES)
        #: The allgather of this step, if there is one, and the set of ranks; and one that was dropped, whose tensors a
        #: host may still hold.
        self._started: Handle | None = None
        self._generation: object = None
        self._dropped: Handle | None = None

    def begin(self) -> None:
        """Called when a step begins. In some steps, starts an allgather of at most 256 bytes a rank. Does not wait."""
        engine, members, numbers = self._engine, self._engine.collectives, self._numbers
        due = engine.step in _FIRST or engine.step % _INTERVAL == 0
        if not (due and numbers and members.active and members.size > 1):
            return
        generation = members.generation()
        if self._started is not None and self._generation is generation:
            return  # of this step, which has failed and is repeated: other ranks may not have started it so far
        device = engine.parameters[0].device
        sketches = torch.stack([_sketch(engine.parameters[number].detach()).to(device) for number in numbers])
        request = allgather(sketches[None], "budget")
        engine.stats.count_request(request, members.size, engine.nodes.ranks)
        self._generation = generation
        self._started = members.start(request, f"{engine.exchanges.label}.weights.{engine.step}")

    def compare(self, averaged: Sequence[int]) -> None:
        """Called when all gradients of the step have arrived. ``averaged``: whether that of each parameter has; others
        that are trained may be the rank's own. Waits for the allgather, and then synchronises a GPU."""
        if self._started is None:
            return
        engine, started = self._engine, self._started
        self._started = None
        differs = _differ(engine.exchanges.wait(started)).tolist()
        for number, apart in zip(self._numbers, differs, strict=True):
            if apart and (averaged[number] or not engine.parameters[number].requires_grad):
                engine.warn(
                    f"the ranks' weights differ, such as {engine.names[number]}, and they have equal averages. Were "
                    "the weights broadcast? Does something in the loop depend on a rank's own gradients, as the norm "
                    "of all does if some are not averaged? Are learning rates equal? Is the GradScaler given as "
                    "grad_scaler=?"
                )
                return

    def clear(self) -> None:
        """Drops the allgather of a step that is not repeated."""
        self._started, self._dropped = None, self._started


def _sketch(parameter: Tensor) -> Tensor:
    """The sum and the norm of a parameter, float64, (2,). A part of it is copied at a time."""
    sums = torch.zeros(2, dtype=torch.float64, device=parameter.device)
    for part in torch.split(as_real(local(parameter)).reshape(-1), _PART):
        wide = part.double()
        sums += torch.stack([wide.sum(), wide.square().sum()])
    return torch.stack([sums[0], sums[1].sqrt()])


def _differ(gathered: Tensor) -> Tensor:
    """Returns which parameters differ, bool, (n,), by the sketches of all ranks, (ranks, n, 2)."""
    first = gathered[0]
    near = (gathered - first).abs() <= _TOLERANCE * first[:, 1:]
    return ~(near | (gathered == first) | (gathered.isnan() & first.isnan())).all(2).all(0)
