"""Gradients that are averaged in every step, beside local steps.

People: give local steps a model in DistributedDataParallel, of `accelerate.prepare()` or with hooks, or Horovod's
    optimizer; or train on the same data on all ranks.
Cost: local steps save nothing, while `stats()` reports 18.9 times fewer bytes than dense.
Noticed: the ranks' gradients are equal before one of the first four exchanges. Only a warning if nothing averages them.
Message: `the gradients are averaged in every step already` …, `all ranks have the same gradients` …
Cure: `hvd_compress.trainers.local_gradients(ddp)`, or the plain model and optimizer; [trainers](trainers.md)

People: begin another training of the model while local steps live.
Cost: DDP averages gradients, and the ranks' weights and optimizer states are each rank's own.
Noticed: after `finish()` an optimizer steps twice without `LocalSteps.step()`.
Message: `has stepped twice without LocalSteps.step()` …
Cure: [`local.end(model)`](local_steps.md) on all ranks before it
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..engine.engine import Engine
from ..engine.hashes import hash_of
from ..engine.shards import local
from ..engine.spread import spread
from .averaging import averages
from .unfit_optimizer import END

# So many weights are looked at, and so many entries of each, before the first exchanges.
_PROBES, _ENTRIES, _EXCHANGES = 8, 64, 4


class OwnGradients:
    """Compares samples of the ranks' gradients."""

    def __init__(self, engine: Engine, parameters: Sequence[Tensor]) -> None:
        self._engine = engine
        self._probes = [parameters[number] for number in spread(range(len(parameters)), _PROBES)]
        self._left, self._hash = _EXCHANGES, 0

    def look(self) -> None:
        """Called before the step of an optimizer that an exchange follows. Synchronises a GPU."""
        if self._left:
            self._hash = self._hash or self._sampled()

    def taken(self) -> int:
        """A hash of what :meth:`look` has seen: 0 if that is nothing, zero or not finite."""
        found, self._hash = self._hash, 0
        return found

    def check(self, seen: Sequence[int]) -> None:
        """Raises ``RuntimeError`` if the gradients of all ranks are the same, and something is found that averages
        them; warns if nothing is. ``seen``: what :meth:`taken` has returned on each rank; empty if that is known."""
        if not seen or not self._left or not seen[0]:  # 0: of steps that a GradScaler skips, as the first ones
            return
        self._left -= 1
        if len(seen) == 1 or len({*seen}) > 1:
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
        raise RuntimeError(
            "the gradients are averaged in every step already, and LocalSteps exchanges weights beside that, which "
            f"saves nothing. They are averaged by {what}"
        )

    def check_step(self, optimizer: Optimizer, steps: int) -> None:
        """Raises ``RuntimeError`` for a second step after the weights were averaged, if something averages gradients.
        ``steps``: of this optimizer, since the last call of LocalSteps."""
        if steps == 2 and (what := averages(self._engine.parameters)):
            raise RuntimeError(
                f"{type(optimizer).__name__} has stepped twice without LocalSteps.step(), on gradients that are "
                f"averaged by {what}. {END}"
            )

    def _sampled(self) -> int:
        found = []
        for parameter in self._probes:
            grad = parameter.grad
            if grad is not None and not grad.is_sparse and local(grad).numel():
                flat = local(grad).detach().flatten()
                found.append(flat[:: -(-flat.numel() // _ENTRIES)].to("cpu", torch.float32))
        sample = torch.cat(found) if found else torch.empty(0, dtype=torch.float32, device="cpu")
        return hash_of([sample]) if bool(sample.isfinite().all()) and bool(sample.any()) else 0
