"""What a simulated run trains, and how."""

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from experiment import data, models
from experiment.optimizers import learning_rate
from experiment.text import Text, stored_library
from torch import nn

#: Tokens of a window.
CONTEXT = 64


@dataclass(frozen=True)
class Setting:
    """A run.

    Args:
        ranks: 1: dense training.
        rate: the peak learning rate.
        period: steps between two averages of the weights, on average.
        power: averages come after equal shares of the sum of the learning rate to this power; 0: of the steps, 2: as
            the quadratic synchronization rule (arXiv 2310.14423).
        bits: of an entry of their differences; 0: float32.
        finer: how many bits more an entry of a rounded mean has.
        others: None if all parameters take local steps; or the bits in which the gradients of all but the hidden
            matrices are averaged over the ranks in each step, before the ranks normalise them; 0: float32.
        task: a key of :data:`TASKS`.
        optimizer: ``"muon"`` for the hidden matrices, or ``"adamw"`` for all parameters.
        seed: of the initial weights and the batches.
        restore_length, outer_rate, outer_momentum: as of :class:`hvd_compress.LocalSteps`, whose ``outer_lr`` the
            second is.
        windows: of a step, of all ranks together; None: the task's.
        averages: None, or how the weights and the optimizer's state of all but the hidden matrices, common to all
            ranks, move by the average of the gradients that the ranks summed since the last exchange, see
            :mod:`simulation.common`: ``"once"`` or ``"replay"``.
        own: with ``averages``, what these weights do between exchanges, on each rank. None: nothing; or steps that are
            dropped at the exchange: by the rank's own gradient with this weight, the rest by that which the momentum
            predicts. 1: local steps; 0: all ranks move alike.

    ``ValueError`` for other averages and for those that do not go together with the rest.
    """

    ranks: int = 16
    rate: float = 4.5e-3
    period: int = 3
    bits: int = 2
    others: int | None = None
    task: str = "gpt"
    optimizer: str = "muon"
    seed: int = 0
    restore_length: bool = False
    windows: int | None = None
    power: float = 0.0
    outer_rate: float = 1.0
    outer_momentum: float = 0.0
    finer: int = 0
    averages: str | None = None
    own: float | None = None

    def __post_init__(self) -> None:
        if self.averages not in (None, "once", "replay"):
            raise ValueError(f"averages must be None, 'once' or 'replay', got {self.averages!r}")
        if self.averages is None and self.own is not None:
            raise ValueError(f"own={self.own} needs averages")
        if self.averages is not None and (self.others is not None or self.optimizer != "muon"):
            raise ValueError(f"averages need optimizer 'muon' and others=None: {self}")


@dataclass(frozen=True)
class Task:
    """A training: model and text, and what its program sets.

    Args:
        model: a key of :data:`experiment.models.MODELS`.
        data: a key of :data:`experiment.data.DATASETS`.
        metric: of the held-out text, ``"bits_per_byte"`` or ``"nats"``.
        warm_up: steps of linear rise of the learning rate; a cosine follows, to the share ``final`` of the peak.
        decay: of the weights, times the learning rate; of norms only if ``norms_decay``.
        muon: the root mean square of Muon's update.
        others: what moves the other parameters beside Muon, ``"sign"`` of the momentum or ``"adamw"``.
        betas: of AdamW.
        clip: the greatest norm of a rank's gradient, or None.
        context: tokens of a window.
        bfloat16: gradients by ``torch.autocast`` to bfloat16; the loss at the end is in float32.
    """

    model: str
    data: str
    vocabulary: int
    metric: str
    steps: int
    windows: int
    warm_up: int
    final: float
    decay: float
    norms_decay: bool
    muon: float
    others: str
    betas: tuple[float, float]
    clip: float | None
    context: int = CONTEXT
    bfloat16: bool = False

    def rate(self, step: int, peak: float) -> float:
        rate = learning_rate(step, peak, self.warm_up, self.steps)
        return rate if step < self.warm_up else self.final * peak + (1 - self.final) * rate

    def build(self) -> nn.Module:
        return models.build(self.model, self.vocabulary, self.context)

    def text(self, folder: Path | None) -> Text:
        """``folder`` holds :data:`experiment.text.SHAKESPEARE` or :data:`experiment.text.STORED_LIBRARY`; without it,
        the standard library is the running Python's."""
        if self.data == "text" and folder is not None:
            return stored_library(folder, self.context)
        text: Text = data.load(self.data, folder, self.context)
        return characters(text, self.vocabulary) if self.vocabulary < 256 else text


def characters(text: Text, vocabulary: int) -> Text:
    """The text with its different bytes numbered from 0. ``ValueError`` if these are not ``vocabulary``."""
    known, codes = torch.cat([text.train, text.held_out]).unique(return_inverse=True)
    if len(known) != vocabulary:
        raise ValueError(f"the text must have {vocabulary} different characters, it has {len(known)}")
    train, held_out = codes.byte().split([len(text.train), len(text.held_out)])
    return Text(train, held_out, text.context)


TASKS = {
    # The GPT of docs/choosing.md, as scripts/experiments/train.py trains it.
    "gpt": Task(
        model="gpt", data="text", vocabulary=256, metric="bits_per_byte", steps=1500, windows=32, warm_up=100, final=0,
        decay=0.01, norms_decay=True, muon=1, others="sign", betas=(0.9, 0.999), clip=None,
    ),
    # nanoGPT's train_shakespeare_char.py with the options that its README has for a CPU, without dropout; Muon as
    # torch.optim.Muon with adjust_lr_fn="match_rms_adamw".
    "nanogpt": Task(
        model="nanogpt", data="shakespeare", vocabulary=65, metric="nats", steps=2000, windows=12, warm_up=100,
        final=0.1, decay=0.1, norms_decay=False, muon=0.2, others="adamw", betas=(0.9, 0.99), clip=1.0,
    ),
}  # fmt: skip
#: Muon's updates are as large as AdamW's, as in README's program, where Muon's weights decay faster.
TASKS["gpt-adamw"] = replace(TASKS["gpt"], others="adamw", muon=0.2)


def of_size(model: str, windows: int, steps: int) -> Task:
    """The GPT of docs/choosing.md wider, on the sources of all installed packages, in windows of 256 bytes.

    Args:
        steps: 20 tokens a parameter: 20 * parameters / (256 * windows). Larger models have more windows, so that steps
            are 1,200 to 3,000.
    """
    wider = replace(TASKS["gpt"], model=model, data="installed", windows=windows, steps=steps)
    return replace(wider, context=256, bfloat16=True)


#: By number of parameters.
SIZES = {
    "gpt-0.3m-20": of_size("gpt", 16, 1322),
    "gpt-1m-20": of_size("gpt-1m", 64, 1226),
    "gpt-2m-20": of_size("gpt-2m", 128, 1521),
    "gpt-5m-20": of_size("gpt-5m", 256, 1681),
    "gpt-10m-20": of_size("gpt-10m", 256, 2961),
}
TASKS |= SIZES
