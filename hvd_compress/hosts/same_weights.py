"""Whether the ranks' weights have stayed the same: looked at now and then in a loop of the user's own.

Equal averages do not keep them equal where the loop does something else on each rank: it clips by a norm to which other
gradients belong, which are the rank's own, or skips a step.
"""

import torch
from torch import Tensor

from ..engine.collectives import allgather
from ..engine.dense import as_real
from ..engine.engine import Engine
from ..engine.shards import local
from ..engine.spread import spread

# The most parameters that are looked at.
_PROBES = 16
# Steps between two looks, after those at the first ones.
_INTERVAL, _FIRST = 100, (1, 10)
# How far a parameter's sum and norm may be apart, in norms: unequal devices round differently.
_TOLERANCE = 1e-3


def warn_of_drift(engine: Engine) -> None:
    """Called by all ranks in each step; warns on all of them if their weights differ: the sum or the norm of one of 16
    parameters by a thousandth of its norm, or NaN on some ranks only. In some steps it waits for an allgather of at
    most 256 bytes a rank, and synchronises a GPU."""
    members = engine.collectives
    floating = [number for number, p in enumerate(engine.parameters) if p.is_floating_point() or p.is_complex()]
    numbers = spread(floating, _PROBES)
    due = engine.step in _FIRST or engine.step % _INTERVAL == 0
    if not (due and numbers and members.active and members.size > 1):
        return
    device = engine.parameters[0].device
    sketches = torch.stack([_sketch(engine.parameters[number].detach()).to(device) for number in numbers])
    request = allgather(sketches[None], "budget")
    engine.stats.count_request(request, members.size, engine.nodes.ranks)
    gathered = engine.exchanges.wait(members.start(request, f"{engine.exchanges.label}.weights"))
    differs = _differ(gathered)
    if bool(differs.any()):
        name = engine.names[numbers[int(differs.int().argmax())]]
        engine.warn(
            f"the ranks' weights differ, such as {name}, and they have equal averages. Were the weights broadcast? "
            "Does something in the loop depend on a rank's own gradients, as the norm of all does if some are not "
            "averaged? Are learning rates equal? Is the GradScaler given as grad_scaler=?"
        )


def _sketch(parameter: Tensor) -> Tensor:
    """The sum and the norm of a parameter, float64, (2,); no copy of it is made."""
    part = as_real(local(parameter))
    return torch.stack([part.sum(dtype=torch.float64), torch.linalg.vector_norm(part, dtype=torch.float64)])


def _differ(gathered: Tensor) -> Tensor:
    """Which parameters differ, bool, (n,), by the sketches of all ranks, (ranks, n, 2)."""
    first = gathered[0]
    near = (gathered - first).abs() <= _TOLERANCE * first[:, 1:]
    return ~(near | (gathered == first) | (gathered.isnan() & first.isnan())).all(2).all(0)
