"""The predictor's results do not depend on torch's global precision settings."""

import pytest
import torch

from hvd_compress.papers.predictor import _PINNED, Predictor, predict


class Recording(Predictor):
    """Records the settings while it computes."""

    def forward(self, windows):
        self.seen = settings()
        return super().forward(windows)


def settings():
    return [getattr(owner, name) for owner, name, _ in _PINNED]


@pytest.fixture(autouse=True)
def settings_restored():
    backends = torch.backends
    torch.set_float32_matmul_precision("highest")
    before = [backends.fp32_precision, backends.cudnn.fp32_precision, *settings()]
    yield
    backends.fp32_precision, backends.cudnn.fp32_precision = before[:2]
    torch.set_float32_matmul_precision("highest")
    for (owner, name, _), value in zip(_PINNED, before[2:], strict=True):
        setattr(owner, name, value)


def set_precision(owner, value="tf32"):
    owner.fp32_precision = value


def set_older(*owners):
    for owner in owners:
        owner.allow_tf32 = True


def set_algorithms():
    torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = True, False


@pytest.mark.parametrize(
    "training",
    [
        lambda: set_older(torch.backends.cuda.matmul, torch.backends.cudnn),
        lambda: torch.set_float32_matmul_precision("medium"),
        lambda: set_precision(torch.backends.cuda.matmul),
        lambda: set_precision(torch.backends.cudnn),
        lambda: set_precision(torch.backends.cudnn.conv, "ieee"),  # not of rnn
        lambda: set_precision(torch.backends),
        set_algorithms,
    ],
    ids=["older", "medium", "matmul", "cudnn", "conv", "all", "algorithms"],
)
def test_precision_and_algorithms_are_pinned_and_restored(training):
    training()
    before, predictor = settings(), Recording()
    predict(predictor, torch.randn(2, 6, 256))
    assert predictor.seen == [value for *_, value in _PINNED]
    assert settings() == before


def test_settings_are_restored_after_an_error():
    before = settings()
    with pytest.raises(RuntimeError, match="channels"):
        predict(Predictor(), torch.randn(2, 5, 256))
    assert settings() == before
