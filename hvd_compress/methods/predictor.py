"""The network that predicts gradients that were not sent (Liu et al., 2024): convolution, channel attention, pooling.

It is trained once (``scripts/train_predictor.py``), ships with the package, and never changes: all ranks hold the same
weights, so that the same inputs give the same predictions.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from importlib import resources
from typing import Any

import torch
from safetensors.torch import load as load_tensors
from torch import Tensor, nn

#: What it sees of every entry of a window: the value that has just arrived, or 0; whether it has; how long ago its last
#: one did, in units of the mean wait, 0 to 4; that value; the smoothed values; the weight. Values in units of their
#: layer's root mean square, weights in theirs.
CHANNELS = 6
_WINDOWS = 512  # at once, so that the memory it takes is bounded
_Settings = tuple[tuple[Any, str, Any], ...]
# How it is computed. Of torch's two interfaces to float32's precision this is the one that kernels read, and that can
# say what was set through the other, allow_tf32; asked what was set through this one, the other raises errors.
_cuda, _cudnn, _mkldnn = (getattr(torch.backends, name) for name in ("cuda", "cudnn", "mkldnn"))
_PINNED: _Settings = (
    (_cudnn, "enabled", True),
    (_cudnn, "benchmark", False),
    (_cudnn, "deterministic", True),
    (_cudnn.conv, "fp32_precision", "ieee"),
    (_cuda.matmul, "fp32_precision", "ieee"),
    (_mkldnn.conv, "fp32_precision", "ieee"),
    (_mkldnn.matmul, "fp32_precision", "ieee"),
)
# Settings are the process's: another thread would take for the user's what is set here.
_lock = threading.RLock()


class Predictor(nn.Module):
    """From windows, float32 (n, 6, 256), to what each entry's gradient per step will be next, (n, 256)."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow = nn.Conv1d(CHANNELS, 32, 3, padding=1)
        self.wide = nn.Conv1d(32, 64, 3, padding=1)
        self.squeeze = nn.Linear(64, 8)
        self.excite = nn.Linear(8, 64)
        self.pool = nn.MaxPool1d(3, stride=1, padding=1)
        self.out = nn.Conv1d(64, 1, 1)

    def forward(self, windows: Tensor) -> Tensor:
        x = self.wide(self.narrow(windows).relu()).relu()
        attention = self.excite(self.squeeze(x.mean(2)).relu()).sigmoid()
        predicted: Tensor = self.out(self.pool(x * attention[:, :, None]))
        return predicted.squeeze(1)


@lru_cache
def shipped(device: torch.device) -> Predictor:
    """The trained one, on a device, once."""
    data = resources.files("hvd_compress").joinpath("weights", "predictor.safetensors").read_bytes()
    predictor = Predictor()
    predictor.load_state_dict(load_tensors(data))
    return predictor.requires_grad_(False).to(device).eval()


@contextmanager
def _pinned() -> Iterator[None]:
    """Whatever precision or algorithm the training itself uses, or is just using: all ranks have to get the same
    bits."""
    with _lock:
        before = tuple((owner, name, getattr(owner, name)) for owner, name, _ in _PINNED)
        try:
            _set(_PINNED)
            yield
        finally:
            _set(before)


def _set(settings: _Settings) -> None:
    """Only what is not so already: what inherits from a setting above it goes on doing so."""
    for owner, name, value in settings:
        if getattr(owner, name) != value:
            setattr(owner, name, value)


def predict(predictor: Predictor, windows: Tensor) -> Tensor:
    """:meth:`Predictor.forward`, some windows at a time: float32, (n, 256)."""
    with torch.autocast(windows.device.type, enabled=False), _pinned():
        return torch.cat([predictor(part) for part in torch.split(windows, _WINDOWS)])


def fields(fresh: Tensor, mask: Tensor, age: Tensor, last: Tensor, smoothed: Tensor, weight: Tensor) -> Tensor:
    """Windows from their channels, each (n, 256), already in units of a root mean square."""
    # A gradient's tails are heavy, and one outlier would drown its neighbours.
    tame = [torch.asinh(channel) for channel in (fresh, last, smoothed, weight)]
    return torch.stack([tame[0], mask, age, *tame[1:]], 1)
