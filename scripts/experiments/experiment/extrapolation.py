"""Extrapolation of the weights from the last epochs: a line, or a network (WNN: Jang et al., ICML 2023). Baselines of
MP2's prediction; nothing is communicated."""

import abc
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

#: Epochs that are used, and epochs that are skipped.
SEEN = AHEAD = 5
WEIGHTS = Path(__file__).with_name("wnn.safetensors")
_CHUNK = 2**16  # weights per call, to limit memory


class Extrapolation(abc.ABC):
    """Keeps the weights of the last epochs and extrapolates when there are five. All ranks must have the same weights.
    Buffers, such as a batch norm's, are not changed."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._parameters = [p for p in parameters if p.requires_grad]
        self._seen: list[list[Tensor]] = []

    @abc.abstractmethod
    def extrapolate(self, past: Tensor) -> Tensor:
        """From float32 (n, 5), oldest first, five epochs ahead: (n,)."""

    @torch.no_grad()
    def epoch_end(self) -> bool:
        """Call it after every epoch. Returns whether it changed the weights."""
        self._seen.append([p.clone() for p in self._parameters])
        if len(self._seen) < SEEN:
            return False
        for parameter, *past in zip(self._parameters, *self._seen, strict=True):
            flat = torch.stack([tensor.reshape(-1).float() for tensor in past], 1)
            ahead = torch.cat([self.extrapolate(part) for part in torch.split(flat, _CHUNK)])
            ahead = ahead.view(parameter.shape).to(parameter.dtype)
            parameter.copy_(torch.where(ahead.isfinite(), ahead, parameter))
        self._seen.clear()
        return True


class Line(Extrapolation):
    """The least-squares line through five points, five epochs on."""

    def extrapolate(self, past: Tensor) -> Tensor:
        time = torch.arange(SEEN, dtype=torch.float32, device=past.device) - (SEEN - 1) / 2
        slope = (past * time).sum(1) / time.square().sum()
        return past.mean(1) + slope * (time[-1] + AHEAD)


class WNN(Extrapolation):
    """The weight nowcaster network: Jang et al., *Learning to Boost Training by Periodic Nowcasting Near Future
    Weights* (ICML 2023), trained by train_wnn.py."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters)
        self._network = trained()

    def extrapolate(self, past: Tensor) -> Tensor:
        return self._network.to(past.device)(past)


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
        return ((scaled[:, -1:] + step) * 2 * scale + first).squeeze(1)


def trained() -> Nowcaster:
    with torch.device("meta"):  # nothing is drawn from torch's generator
        network = Nowcaster()
    network.load_state_dict(load_file(WEIGHTS), assign=True)
    return network.requires_grad_(False).eval()
