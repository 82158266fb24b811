"""scripts/lab/scaling.py: its formulas against counted bytes."""

import pytest
import scaling
import torch


@pytest.fixture(scope="module")
def model():
    """Tensors with padding, a small one, a norm and biases."""
    torch.manual_seed(0)
    return torch.nn.ModuleList(
        [torch.nn.Linear(301, 47), torch.nn.Conv2d(8, 33, 3), torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8)]
    )


@pytest.mark.parametrize("ranks", [2, 5])
@pytest.mark.parametrize("method", list(scaling.METHODS))
def test_formulas_are_what_is_counted(method, ranks, model):
    density, _ = scaling.FORMULAS[method]
    # Also frequencies as a bitmap.
    for share in (density, density and 1 / 5):
        want = scaling.counted(method, model, share, ranks)
        assert scaling.modelled(method, model, share, ranks) == pytest.approx(want, rel=1e-9)


def test_shared_indices_stay_flat_and_gathers_grow():
    model = scaling.network()

    def growth(method):
        few, many = (scaling.modelled(method, model, scaling.FORMULAS[method][0], n) for n in (4, 64))
        return many / few

    # The ring sends 2 (N - 1) / N: 1.3 times as much; a gather N - 1: 21 times.
    assert growth("dense") == pytest.approx(1.3125)
    assert all(growth(method) < 3 for method in ("IWP", "FFT", "DeMo", "MIPD", "SlimDP", "MP2", "TernGrad"))
    assert growth("Quantized") == pytest.approx(1.3125, rel=0.01)
    assert all(growth(method) > 14 for method in ("FFT, gather", "DeMo, gather", "TopK", "DGC", "QSGD"))
