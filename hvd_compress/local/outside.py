"""Weights that were replaced between local steps, which an exchange would take for progress."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..engine.bucket import is_dense
from ..engine.shards import local
from .common_weights import Weight

# So many weights are looked at, and so many entries of each.
_PROBES, _ENTRIES = 32, 16
# Relative change that counts as rounding: some optimizers add an average to the weights for a validation, and subtract
# it afterwards. In units of the dtype's precision, and at least.
_ROUNDING, _LEAST = 2.0, 1e-5


class OutsideChanges:
    """Compares the weights with those that the last step of an optimizer, or the last exchange, has left.

    torch's version counters are looked at first. If they have moved, and on the CPU in any case, samples of the entries
    decide: weights that were swapped out and in again have not changed. What changes the weights in every step from
    the first one on, such as clamping, belongs to the training.
    """

    def __init__(self, weights: Sequence[Weight]) -> None:
        self._weights = weights
        dense = [weight for weight in weights if weight.own.numel() and is_dense(weight.own)]
        self._probes = dense[:: -(-len(dense) // _PROBES)] if dense else []
        #: None while there is nothing to compare with.
        self._versions: list[tuple[int, int]] | None = None
        self._samples: Tensor | None = None
        #: By place in the loop, whether the weights have changed there in every step so far.
        self._usual: dict[str, bool] = {}

    def note(self) -> None:
        """The weights are as they should be."""
        self._versions, self._samples = self._counters(), self._sampled()

    def forget(self) -> None:
        """The next weights are compared with nothing."""
        self._versions = self._samples = None

    def check(self, place: str, routine: bool = True) -> None:
        """Raises ``RuntimeError`` if the weights have changed since :meth:`note`, unless they have always changed at
        this place of the loop. ``routine``: whether every step comes to this place. Synchronises a GPU if version
        counters have moved."""
        if self._versions is None:
            return
        changed, usual = self._changed(), self._usual.get(place, routine)
        if routine:
            self._usual[place] = usual and changed
        if changed and usual:
            self.note()
        elif changed:
            raise RuntimeError(
                f"the weights have changed {place}, and not by an optimizer's step: by load_state_dict(), an EMA "
                "switch, a roll-back? The next exchange would take that for progress. Call local.take_weights() on all "
                "ranks after weights were replaced. What belongs to the training, such as clamping, belongs into every "
                "step or into optimizer.register_step_post_hook()"
            )

    def _changed(self) -> bool:
        before = self._samples
        if before is None or not (before.is_cpu or self._versions != self._counters()):
            return False
        now = self._sampled()
        assert now is not None
        differs = ~((now == before) | (now.isnan() & before.isnan()))
        if now.dtype != before.dtype or not bool(differs.any()):
            return now.dtype != before.dtype
        rounding = max(_LEAST, *(_ROUNDING * torch.finfo(weight.own.dtype).eps for weight in self._probes))
        return not bool((now - before)[differs].norm() <= rounding * before.norm())

    def _counters(self) -> list[tuple[int, int]]:
        """Of every weight; a DTensor and its shard count apart."""
        return [(w.parameter._version, local(w.parameter)._version) for w in self._weights]

    def _sampled(self) -> Tensor | None:
        if not self._probes:
            return None
        device, parts = self._probes[0].own.device, []
        for own in (weight.own for weight in self._probes):
            count = min(_ENTRIES, own.numel())
            parts.append(own.as_strided((count,), (own.numel() // count,)).to(device, torch.float32))
        return torch.cat(parts)
