"""Extrapolation of the weights from the last epochs: a line, or a network (WNN: Jang et al., ICML 2023).

Baselines of MP2's prediction, usable with any training; nothing is communicated::

    ahead = hvd_compress.extrapolation.WNN(model.parameters())
    for epoch in range(epochs):
        train(...)
        ahead.epoch_end()          # on all ranks; every fifth call changes the weights
"""

import abc
from collections.abc import Iterable
from functools import lru_cache
from importlib import resources

import torch
from safetensors.torch import load as load_tensors
from torch import Tensor, nn

from ..engine.modes import modes_off
from ..engine.state import TensorLeaf, described

#: Epochs that are used, and epochs that are skipped.
SEEN = AHEAD = 5
_CHUNK = 2**16  # weights per call, to limit memory


class Extrapolation(abc.ABC):
    """Keeps the weights of the last epochs and extrapolates when there are five.

    All ranks must have the same weights and compute the same result: on one type of processor. Holds up to four copies
    of the weights. Buffers, such as a batch norm's, are not changed. After an elastic restart call :meth:`reset` on all
    ranks: a new rank would otherwise extrapolate at other epochs.

    Args:
        parameters: the model's; those that need no gradient are not changed.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._parameters = [p for p in parameters if p.requires_grad]
        self._seen: list[list[Tensor]] = []

    @abc.abstractmethod
    def extrapolate(self, past: Tensor) -> Tensor:
        """From float32 (n, 5), oldest first, five epochs ahead: (n,)."""

    @modes_off
    def epoch_end(self) -> bool:
        """Call it after every epoch. Returns whether it changed the weights."""
        self._seen.append([p.detach().clone() for p in self._parameters])
        if len(self._seen) < SEEN:
            return False
        for parameter, *past in zip(self._parameters, *self._seen, strict=True):
            flat = torch.stack([tensor.reshape(-1).float() for tensor in past], 1)
            ahead = torch.cat([self.extrapolate(part) for part in torch.split(flat, _CHUNK)])
            ahead = ahead.view(parameter.shape).to(parameter.dtype)
            parameter.copy_(torch.where(ahead.isfinite(), ahead, parameter))
        self._seen.clear()
        return True

    def reset(self) -> None:
        """Drops the weights of past epochs."""
        self._seen.clear()

    def state_dict(self) -> dict[str, list[list[Tensor]]]:
        """The weights of past epochs."""
        return {"seen": [list(epoch) for epoch in self._seen]}

    def load_state_dict(self, state: dict[str, list[list[Tensor]]]) -> None:
        """The inverse of :meth:`state_dict`. Raises ``ValueError``, and changes nothing, for a damaged state or one of
        another model."""
        seen, count = state.get("seen") if isinstance(state, dict) else None, len(self._parameters)
        if not isinstance(seen, list) or len(seen) >= SEEN:
            raise ValueError(f"seen: must be a list of at most {SEEN - 1} epochs, got {described(seen)}")
        for number, epoch in enumerate(seen):
            if not isinstance(epoch, list) or len(epoch) != count:
                raise ValueError(f"seen.{number}: must be a list of {count} tensors, got {described(epoch)}")
            for position, (tensor, p) in enumerate(zip(epoch, self._parameters, strict=True)):
                TensorLeaf(p, finite=False).check(tensor, f"seen.{number}.{position}")
        self._seen = [[t.to(p.device, copy=True) for t, p in zip(e, self._parameters, strict=True)] for e in seen]


class Line(Extrapolation):
    """The least-squares line through five points, five epochs on."""

    def extrapolate(self, past: Tensor) -> Tensor:
        time = torch.arange(SEEN, dtype=torch.float32, device=past.device) - (SEEN - 1) / 2
        slope = (past * time).sum(1) / time.square().sum()
        return past.mean(1) + slope * (time[-1] + AHEAD)


class WNN(Extrapolation):
    """The weight nowcaster network: Jang et al., *Learning to Boost Training by Periodic Nowcasting Near Future
    Weights* (ICML 2023), trained by ``scripts/experiments/train_wnn.py``.

    Args:
        parameters: see :class:`Extrapolation`.
        network: replaces the shipped network.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], network: "Nowcaster | None" = None) -> None:
        super().__init__(parameters)
        self._network = network

    def extrapolate(self, past: Tensor) -> Tensor:
        ahead: Tensor = (self._network or shipped(past.device))(past)
        return ahead


class Stream(nn.Module):
    """A dense layer whose activation function has its own coefficients for every input: a + b exp(c h)."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.hidden = nn.Linear(inputs, 64)
        self.summary = nn.Linear(64, 8)
        self.a, self.b, self.c = (nn.Linear(8, 64) for _ in range(3))
        self.out = nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        h = self.hidden(x)
        u = self.summary(h).relu()
        # Limited: the exponential must not overflow.
        active = self.a(u) + self.b(u) * (self.c(u) * h).clamp(max=8.0).exp()
        return nn.functional.leaky_relu(self.out(active))


class Nowcaster(nn.Module):
    """From weights of five epochs, float32 (n, 5), to those five epochs later, (n,)."""

    def __init__(self) -> None:
        super().__init__()
        self.values, self.differences = Stream(SEEN), Stream(SEEN - 1)
        self.last = nn.Linear(64, 1)

    def forward(self, past: Tensor) -> Tensor:
        first = past[:, :1]
        scale = past.amax(1, keepdim=True) - past.amin(1, keepdim=True) + 1e-5
        scaled = (past - first) / (2 * scale)
        both = torch.cat([self.values(scaled), self.differences(scaled.diff(dim=1))], 1)
        step = self.last(both).tanh()
        ahead: Tensor = ((scaled[:, -1:] + step) * 2 * scale + first).squeeze(1)
        return ahead


@lru_cache
@modes_off
def shipped(device: torch.device) -> Nowcaster:
    """The trained network on a device, loaded once."""
    data = resources.files("hvd_compress").joinpath("weights", "wnn.safetensors").read_bytes()
    with torch.device("meta"):  # nothing is drawn from torch's generator, and the tensors keep their dtype
        network = Nowcaster()
    network.load_state_dict(load_tensors(data), assign=True)
    return network.requires_grad_(False).to(device).eval()
