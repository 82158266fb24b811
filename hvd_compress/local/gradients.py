"""Whether the ranks' gradients are their own: with gradients that are averaged in every step, local steps save
nothing."""

from collections.abc import Sequence

import torch

from ..engine.agreement import hash_of
from ..engine.engine import Engine
from ..engine.shards import local
from ..engine.spread import spread
from ..guards.averaging import averages
from .calls import Different, Row
from .common_weights import Weight

# So many weights are looked at, and so many entries of each, before the first exchanges.
_PROBES, _ENTRIES, _EXCHANGES = 8, 64, 4


class OwnGradients:
    """Compares samples of the ranks' gradients before the first exchanges."""

    def __init__(self, engine: Engine, weights: Sequence[Weight]) -> None:
        self._engine = engine
        self._probes = [weights[number] for number in spread(range(len(weights)), _PROBES)]
        self._left, self._hash = _EXCHANGES, 0

    def look(self) -> None:
        """Called before the step of an optimizer that an exchange follows. Synchronises a GPU."""
        if self._left:
            self._hash = self._hash or self._sampled()

    def taken(self) -> int:
        """A hash of what :meth:`look` has seen: 0 if that is nothing, zero or not finite."""
        found, self._hash = self._hash, 0
        return found

    def check(self, rows: Sequence[Row]) -> None:
        """Raises ``RuntimeError`` if the gradients of all ranks are the same, and something is found that averages
        them; warns if nothing is. ``rows``: of all ranks; none if they were seen before."""
        if not rows or not self._left:
            return
        self._left -= 1
        if len(rows) == 1 or not rows[0].extra or len({row.extra for row in rows}) > 1:
            return
        what = averages(self._engine.parameters)
        if what is None:
            self._left = 0
            self._engine.warn(
                "all ranks have the same gradients: do they train on the same data, or does something average the "
                "gradients in every step? Local steps then save nothing"
            )
            return
        self._left = _EXCHANGES
        raise Different(
            "the gradients are averaged in every step already, and LocalSteps exchanges weights beside that, which "
            f"saves nothing. They are averaged by {what}"
        )

    def _sampled(self) -> int:
        found = []
        for weight in self._probes:
            grad = weight.parameter.grad
            if grad is not None and not grad.is_sparse and local(grad).numel():
                flat = local(grad).detach().flatten()
                found.append(flat[:: -(-flat.numel() // _ENTRIES)].to("cpu", torch.float32))
        sample = torch.cat(found) if found else torch.empty(0, dtype=torch.float32, device="cpu")
        return hash_of([sample]) if bool(sample.isfinite().all()) and bool(sample.any()) else 0
