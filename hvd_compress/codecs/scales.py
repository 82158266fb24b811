"""What all ranks know of the size and the distribution of each group's values, from messages they exchanged anyway."""

from collections.abc import Generator
from typing import Any

import torch
from torch import Tensor

from .. import ops
from ..engine.collectives import Request, allreduce
from ..reference.scales import LARGEST, SMALLEST, SMOOTHING, bounded, divided, kind_of, root_mean_square, running
from .base import Channel

# What the next step's largest magnitude may be, in units of this step's.
_ROOM = 1.5


class Moments:
    """Of one tensor of values: per group the count, root mean square, kind of distribution and largest magnitude."""

    def __init__(self, values: Tensor, edges: Tensor) -> None:
        table = torch.empty(len(edges) - 1, 3, dtype=torch.float64, device=values.device)
        ops.moments(values, edges, table)
        self.count = edges.diff()
        self.square, fourth, self.peak = table.unbind(1)
        self.rms = root_mean_square(self.square, self.count)
        #: 0 where the values look Gaussian, 1 where Laplacian: int64, a row of a codebook.
        self.kind = kind_of(self.square, fourth, self.count)

    def scale(self, peak: bool) -> Tensor:
        return self.peak if peak else self.rms


class Scales:
    """The running scales of a channel, float64, (groups,), the same bits on every rank.

    ``local``: of the values a rank sends (root mean square, or the largest magnitude where ``peak``). ``mean``: of
    their average, likewise. ``kind``: 0 where the averages look Gaussian, 1 where Laplacian (int64).
    """

    def __init__(self, groups: int, device: torch.device, peak: bool = False) -> None:
        self.peak, self.device = peak, device
        self.known = False
        self.local = torch.ones(groups, dtype=torch.float64, device=device)
        self.mean = self.local.clone()
        self.kind = torch.zeros(groups, dtype=torch.int64, device=device)
        self.begin_step()

    def first(self, moments: Moments, ranks: int) -> Generator[Request, Tensor, None]:
        """Nothing is known yet: one small sum tells. The largest of the ranks' peaks is not a sum: their root mean
        square, which is within a factor sqrt(ranks), must do for one step."""
        mine = moments.peak.square() if self.peak else moments.square / moments.count.clamp(min=1)
        total = yield allreduce(torch.where(moments.count > 0, mine, 0.0), "budget", "scales")
        self.local = bounded(divided(total, ranks).sqrt())
        self.mean = bounded(divided(self.local, ranks**0.5))
        self.known = True

    def begin_step(self) -> None:
        """A step begins: what :meth:`undo_step` goes back to."""
        self._marked = self.known, self.local, self.mean, self.kind

    def undo_step(self) -> None:
        """The step failed, maybe on some ranks only: they must not differ from now on."""
        self.known, self.local, self.mean, self.kind = self._marked

    def update(self, local: Tensor, mean: Tensor, decoded: Moments) -> None:
        """After a step: the scales that all ranks saw in their values, and in the average before it was coded; and the
        ``decoded`` average itself, which only tells the kind: a scale that followed what it made itself could do
        nothing but shrink."""
        here = decoded.count > 0
        self.local = torch.where(here, self._running(self.local, local), self.local)
        self.mean = torch.where(here, self._running(self.mean, mean), self.mean)
        self.kind = torch.where(here, decoded.kind, self.kind)

    def update_from_lanes(self, average: Tensor, edges: Tensor, rest: Tensor, ranks: int) -> None:
        """The same of lanes, whose average is not coded: :func:`hvd_compress.reference.lanes_update`. In new memory:
        :meth:`undo_step` goes back to the old."""
        local, kind = torch.empty_like(self.local), torch.empty_like(self.kind)
        ops.lanes_update(average, edges, self.local, self.kind, rest, local, kind, ranks)
        self.local, self.kind = local, kind

    def _running(self, old: Tensor, new: Tensor) -> Tensor:
        # A root mean square is followed on average; a peak at once upwards and with room, or every other value that
        # sets a new one would be cut off.
        return bounded(torch.maximum(old * (1 - SMOOTHING), new * _ROOM)) if self.peak else running(old, new)

    def state_dict(self) -> dict[str, Any]:
        return {"known": self.known, **{name: getattr(self, name).clone() for name in ("local", "mean", "kind")}}

    def check_state(self, state: dict[str, Any]) -> None:
        """Raises ``ValueError`` for what :meth:`state_dict` cannot have said: no operator checks a scale."""
        for name, low, high in (("local", SMALLEST, LARGEST), ("mean", SMALLEST, LARGEST), ("kind", 0, 1)):
            own, loaded = getattr(self, name), state[name]
            if loaded.shape != own.shape or not bool(((loaded >= low) & (loaded <= high)).all()):
                raise ValueError(
                    f"the state is damaged: its {name} scales must be {len(own)} numbers from {low:g} to {high:g}, and "
                    f"are {loaded.tolist()!r:.200}"
                )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self.known = state["known"]
        for name in ("local", "mean", "kind"):
            setattr(self, name, state[name].to(self.device, copy=True))
        self.begin_step()


class ScaledChannel(Channel):
    """A channel whose ``scales`` follow the values from step to step."""

    scales: Scales

    def begin_step(self) -> None:
        self.scales.begin_step()

    def undo_step(self) -> None:
        self.scales.undo_step()

    def state_dict(self) -> dict[str, Any]:
        return self.scales.state_dict()

    def check_state(self, state: dict[str, Any]) -> None:
        self.scales.check_state(state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scales.load_state_dict(state)
