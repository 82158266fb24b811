"""Explore and exploit: a core of significant entries, and random ones of the others (Sun et al., arXiv 1709.09393)."""

from typing import Any

from torch import Tensor

from ..codecs import Codec
from ..engine.arguments import NamedParameters, check_number
from ..engine.bucket import Bucket
from ..engine.exchange import Exchange
from ..engine.rng import derive
from ..engine.state import Tree
from ..engine.work import Part, Step
from ..methods.sparse import SparseMethod
from ..methods.sparse_work import Sending, SparseWork, totals
from ..reference import flat_positions
from ..selection.deciders import Shared
from ..selection.pickers import Blocks
from ..selection.schedule import Density
from .history import GradientHistory, flat_weights, root_mean_squares

# Steps between selections of the core.
_RESELECT = 20
# The weight with which an entry is always drawn: a draw divides weights by numbers between 2**-33 and 23.
_CORE = 1e20


class SlimDP(SparseMethod):
    r"""Slim-DP: significant entries (the core) are sent in every step, and a random part of the others (the explorer).

    Implements the published idea of Sun, Chen, Bian, Liu & Liu, *Slim-DP: A Light Communication Data Parallelism for
    DNN* (arXiv 1709.09393; AAMAS 2018). On rank i, for one parameter with gradient g_i and residual r_i; weights w and
    smoothed average gradient e (per step) are equal on all ranks::

        a_i = r_i + g_i                                         with momentum u_i instead of g_i, as in IWP
        s   = |w| / rms(w) + |e| / rms(e)                       in every 20th step
        C   = the largest s of every 256: a share ``core`` of their slots
        E   = random others of the 256 in the remaining slots, drawn in each step
        S   = C + E
        g   = mean_i Q(a_i[S]) on S, 0 elsewhere                Q: the codec
        r_i = a_i - Q(a_i[S]) on S, a_i elsewhere
        e   = smoothing e + (1 - smoothing) (received value / steps since the entry was last sent)   on S

    The paper's: a core by magnitude and gradient (the formula is ours), a random explorer. Re-selection is of later
    literature. Ours: core and explorer from state and seed that all ranks share, so that no indices are sent; the m
    largest of every 256, which may leave out a significant entry whose block is full; the residual. The paper's workers
    take several steps, exchange parameters and continue from their own: :class:`~hvd_compress.LocalSteps` does so here.

    In each step the ranks compare a hash of seed, step, options and selection, and raise an error if they differ (on a
    GPU in every hundredth step).

    Example::

        compression = hvd_compress.SlimDP(model, density=1 / 64)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        compression.take_momentum(optimizer)  # better accuracy
        ddp = DistributedDataParallel(model)
        ddp.register_comm_hook(compression, hvd_compress.ddp_hook)

    Args:
        density: entries sent in a step as a share of all (the paper's alpha).
        core: the core's share of them (the paper's beta / alpha), in [0, 1].
        smoothing: weight of the past in e, in [0, 1).

    Other arguments, and errors: see :class:`~hvd_compress.methods.sparse.SparseMethod`.
    """

    def __init__(
        self,
        named_parameters: NamedParameters,
        density: float | Density = 1 / 32,
        *,
        core: float = 0.5,
        values: str | Codec = "lanes4",
        smoothing: float = 0.9,
        **common: Any,
    ) -> None:
        self._core = check_number("core", core, at_least=0, at_most=1)
        self._smoothing = check_number("smoothing", smoothing, at_least=0, below=1)
        super().__init__(named_parameters, density, values=values, **common)

    def sparse_work(self, bucket: Bucket, sending: Sending) -> SparseWork:
        return _SlimDPWork(bucket, sending, self._core, self._smoothing)

    def options(self) -> dict[str, object]:
        return {**super().options(), "core": self._core, "smoothing": self._smoothing}


class _Core(Part):
    """Each entry's weight in the random draw, bucket-wide: 1, or so large in the core that it is always drawn."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket, self.chance = bucket, bucket.zeros()
        self.restart()

    def choose(self, picker: Blocks) -> None:
        self.chance.fill_(1.0)
        self.chance[flat_positions(picker.indices, picker.table, picker.phase)] = _CORE

    def restart(self) -> None:
        self.chance.fill_(1.0)

    def state(self) -> Tree:
        return self._bucket.saved(self.chance, low=1.0)


class _SlimDPWork(SparseWork):
    def __init__(self, bucket: Bucket, sending: Sending, share: float, smoothing: float) -> None:
        self._share, self._core, self._history = share, _Core(bucket), GradientHistory(bucket, smoothing)
        super().__init__(bucket, sending, core=self._core, history=self._history)

    def decide(self, slots: list[int]) -> Shared:
        return self.shared(Blocks(self.bucket, slots))

    def significance(self) -> list[Tensor]:
        """The significance of each piece's entries, in memory order: float32, (entries,), bit-equal on all ranks."""
        bucket, weights, smoothed = self.bucket, flat_weights(self.bucket), self._history.smoothed
        of_weights, of_gradients = root_mean_squares(bucket, weights, smoothed)
        rows = zip(bucket.pieces, weights, of_weights, of_gradients, strict=True)
        return [weight.abs() / w + piece.of(smoothed)[: piece.numel].abs() / e for piece, weight, w, e in rows]

    def importance(self) -> Tensor:
        return totals(self.significance())

    def begin(self, step: Step) -> None:
        super().begin(step)
        picker = self.decider.picker
        # Blocks keep their slots as long as their core: with fewer, the core would not fit.
        since = step.number - step.number % _RESELECT
        picker.rotate(derive(step.seed, since, self.bucket.index) & 0xFFFF)
        if since == step.number and isinstance(picker, Blocks):
            core = Blocks(self.bucket, [round(slots * self._share) for slots in picker.slots])
            core.begin(step)
            core.rotate(picker.phase)
            core.pick_by(self.significance(), 0.0)
            self._core.choose(core)

    def send(self) -> Exchange:
        picker = self.decider.picker
        if isinstance(picker, Blocks):
            # S: all drawn at random, without replacement, in proportion to their weights.
            picker.pick_by([piece.of(self._core.chance)[: piece.numel] for piece in self.bucket.pieces], 1.0)
        yield from super().send()
        self._history.update(picker, self.values.channel.mean, self.step.number)
