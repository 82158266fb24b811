"""Whether the ranks' weights have stayed the same: looked at now and then in a loop of the user's own.

Equal averages do not keep them equal where the loop does something else on each rank: it clips by a norm to which other
gradients belong, which are the rank's own, or skips a step.
"""

import torch

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
    """Called by all ranks in each step; warns on all of them if their weights differ. In some steps it waits for an
    allgather of at most 256 bytes a rank, and synchronises a GPU."""
    members = engine.collectives
    numbers = spread([number for number, p in enumerate(engine.parameters) if p.requires_grad], _PROBES)
    due = engine.step in _FIRST or engine.step % _INTERVAL == 0
    if not (due and numbers and members.active and members.size > 1):
        return
    parts = [as_real(local(engine.parameters[number].detach())).double() for number in numbers]
    sums = torch.stack([torch.stack([part.sum(), part.norm()]).to(parts[0].device) for part in parts])
    request = allgather(sums[None], "budget")
    engine.stats.count_request(request, members.size, engine.nodes.ranks)
    gathered = engine.exchanges.wait(members.start(request, f"{engine.exchanges.label}.weights"))
    norms = gathered[0, :, 1:]
    apart = ((gathered - gathered[0]).abs() / norms.clamp(min=1e-30)).amax(dim=(0, 2))
    if bool(apart.max() > _TOLERANCE):
        worst = int(apart.argmax())
        engine.warn(
            f"the ranks' weights differ ({engine.names[numbers[worst]]} by {float(apart[worst]):.2g} of its norm), and "
            "they have equal averages. Were the weights broadcast? Does something in the loop depend on a rank's own "
            "gradients, as the norm of all does if some are not averaged? Are learning rates equal? Is the GradScaler "
            "given as grad_scaler=?"
        )
