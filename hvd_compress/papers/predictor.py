"""The network that predicts unsent gradients (Liu et al., 2024): convolution, channel attention, pooling. It is trained
once (``train_predictor.py``) and shipped with the package, so that all ranks have the same weights."""

import threading
from functools import lru_cache
from importlib import resources
from typing import Any

import torch
from safetensors.torch import load as load_tensors
from torch import Tensor, nn

from ..engine.modes import modes_off

#: Inputs for each entry of a window: the value just received, or 0; whether one was; the age of the last one in units
#: of the mean time between two, 0 to 4; that value; the smoothed values; the weight. Values and weights are in units of
#: their layer's root mean square.
CHANNELS = 6
_WINDOWS = 512  # per forward pass, to limit memory
_Settings = tuple[tuple[Any, str, Any], ...]
# Settings that fix how it is computed. torch has two interfaces for the precision of float32; kernels read this one,
# and it also reports settings made through the other (allow_tf32), which raises errors the other way round.
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
# The settings are global to the process: without a lock another thread could save ours as the user's.
_lock = threading.RLock()


class Predictor(nn.Module):
    """Maps windows, float32 (n, 6, 256), to each entry's next gradient per step, (n, 256)."""

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
@modes_off
def shipped(device: torch.device) -> Predictor:
    """The trained predictor on a device, loaded once."""
    data = resources.files("hvd_compress").joinpath("weights", "predictor.safetensors").read_bytes()
    with torch.device("meta"):  # nothing is drawn from torch's generator, and the tensors keep their dtype
        predictor = Predictor()
    predictor.load_state_dict(load_tensors(data), assign=True)
    return predictor.requires_grad_(False).to(device).eval()


def _set(settings: _Settings) -> None:
    """Changes the settings that differ only, so that settings that inherit from others continue to do so."""
    for owner, name, value in settings:
        if getattr(owner, name) != value:
            setattr(owner, name, value)


def predict(predictor: Predictor, windows: Tensor) -> Tensor:
    """:meth:`Predictor.forward` in batches of windows: float32, (n, 256). Fixes precision and algorithms, whatever the
    training uses: all ranks must compute the same bits."""
    with _lock:
        before = tuple((owner, name, getattr(owner, name)) for owner, name, _ in _PINNED)
        try:
            _set(_PINNED)
            return torch.cat([predictor(part) for part in torch.split(windows, _WINDOWS)])
        finally:
            _set(before)


def fields(fresh: Tensor, mask: Tensor, age: Tensor, last: Tensor, smoothed: Tensor, weight: Tensor) -> Tensor:
    """Windows from their channels, each (n, 256), already in units of a root mean square."""
    # Gradients have heavy tails: limit outliers.
    limited = [torch.asinh(channel) for channel in (fresh, last, smoothed, weight)]
    return torch.stack([limited[0], mask, age, *limited[1:]], 1)
