"""Weights that are replaced between local steps, which an exchange would take for progress.

People: load other weights in training (`load_state_dict(best)`), switch to an EMA, average (SWA), roll back, merge
    adapters.
Cost: 16 to 157 % of the difference was in the weights after the next exchange.
Noticed: some entries of 32 weights are compared with those that the last step of an optimizer, or the last exchange,
    has left.
Message: `the weights have changed` …, `some weights have changed` …
Cure: [`local.take_weights()`](local_steps.md#what-to-know) on all ranks after it
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..engine.bucket import is_dense
from ..engine.optimizers import parameters_of
from ..engine.shards import local
from ..engine.spread import spread

# Where in a training loop weights are looked at, for errors.
AFTER_STEP, AFTER_CALL = "since the optimizer's last step", "since the last call of LocalSteps"
# So many weights are looked at, and so many entries of each.
_PROBES, _ENTRIES = 32, 16
# Relative change of a probe that counts as rounding, in units of its dtype's precision and at least: some optimizers
# add an average to the weights for a validation, and subtract it afterwards.
_ROUNDING, _LEAST = 1.0, 1e-5


class ReplacedWeights:
    """Compares the weights with those that the last step of an optimizer, or the last exchange, has left.

    torch's version counters are looked at first. If they have moved, and on the CPU in any case, samples of the entries
    decide: weights that were swapped out and in again have not changed. If most of the samples have changed, the
    weights were replaced; of fewer ones it warns. What changes the weights in every step from the first one on, such
    as clamping, belongs to the training.

    Args:
        parameters: those that an optimizer holds.
        warn: called with a warning.
    """

    def __init__(self, parameters: Sequence[Tensor], warn: Callable[[str], None]) -> None:
        self._warn = warn
        owns = [(p, local(p)) for p in parameters]
        # One sample must not lie on several devices.
        device = next((own.device for _, own in owns if not own.is_cpu), torch.device("cpu"))
        dense = [p for p, own in owns if own.numel() and is_dense(own) and own.device == device]
        large = [p for p in dense if local(p).numel() >= _ENTRIES]
        chosen, self._entries = large or dense, _ENTRIES if large else 1
        self._probes = [chosen[number] for number in spread(range(len(chosen)), _PROBES)]
        #: Whether a look at the samples waits for nobody.
        self.free = device.type == "cpu"
        least = [max(_LEAST, _ROUNDING * torch.finfo(p.dtype).eps) for p in self._probes]
        self._rounding = torch.tensor(least, dtype=torch.float32, device=device)
        #: By probe: its samples, (probes, entries), or None while nothing is to be compared with; its version counters.
        self._samples: Tensor | None = None
        self._counters: list[tuple[int, int]] = []
        #: By place in the loop, whether the weights have changed there in every step so far.
        self._usual: dict[str, bool] = {}

    def note(self) -> None:
        """The weights are as they should be."""
        self._counters, self._samples = list(map(_counter, self._probes)), self._sampled(self._probes)

    def note_step(self, optimizer: Optimizer) -> None:
        """Notes that the weights of an optimizer are as its step has left them."""
        if self._samples is None:
            self.note()
            return
        held = parameters_of([optimizer])
        rows = [row for row, probe in enumerate(self._probes) if id(probe) in held]
        for row in rows:
            self._counters[row] = _counter(self._probes[row])
        if rows:
            self._samples[rows] = self._sampled([self._probes[row] for row in rows])

    def clear(self) -> None:
        """The next weights are compared with nothing."""
        self._samples = None

    def check(self, place: str, routine: bool = True) -> None:
        """Raises ``RuntimeError`` if the weights were replaced since :meth:`note`, unless they have always changed at
        this place of the loop. ``routine``: whether every step comes to this place. Synchronises a GPU if version
        counters have moved."""
        share, usual = self.changed(), self._usual.get(place, routine)
        if routine and self._samples is not None:
            self._usual[place] = usual and share > 0.0
        if share > 0.5 and not usual:
            raise RuntimeError(
                f"the weights have changed {place}, and not by an optimizer's step: by load_state_dict(), an EMA "
                "switch, a roll-back? The next exchange would take that for progress. Call local.take_weights() on all "
                "ranks after weights were replaced. A change that belongs to the training, such as clamping, belongs "
                "in every step or in optimizer.register_step_post_hook(); LocalSteps(watch_weights=False) allows any"
            )
        if share > 0.0:
            if not usual:
                self._warn(
                    f"some weights have changed {place}, and not by an optimizer's step: if they were replaced (a new "
                    "head), call local.take_weights() on all ranks after that"
                )
            self.note()

    def changed(self) -> float:
        """The share of the samples that have changed since :meth:`note`. Synchronises a GPU as :meth:`check`."""
        before = self._samples
        if before is None or not self._probes:
            return 0.0
        if not self.free and self._counters == list(map(_counter, self._probes)):
            return 0.0
        now = self._sampled(self._probes)
        if torch.equal(now, before):
            return 0.0
        same = (now == before) | (now.isnan() & before.isnan())
        moved = torch.where(same, 0.0, now - before).norm(dim=1)
        size = torch.where(before.isfinite(), before, 0.0).norm(dim=1)
        return float((~(moved <= self._rounding * size)).float().mean())

    def _sampled(self, probes: Sequence[Tensor]) -> Tensor:
        """Float32, (probes, entries)."""
        owns, count = [local(probe).detach() for probe in probes], self._entries
        rows = [own.as_strided((count,), (own.numel() // count,)) for own in owns]
        return torch.stack(rows).float() if rows else torch.zeros((0, count), dtype=torch.float32, device="cpu")


def _counter(parameter: Tensor) -> tuple[int, int]:
    """A DTensor and its shard count apart."""
    return parameter._version, local(parameter)._version
