"""Models of the experiments."""

import pytest
import torch
from experiment import models


@pytest.mark.parametrize(
    ("name", "channels", "size", "classes", "parameters"),
    [
        ("mlp", 1, 8, 10, 100_000),
        ("mlp", 3, 32, 10, 100_000),
        ("cnn", 1, 8, 10, 186_538),
        ("cnn", 3, 32, 10, 187_114),
        ("resnet20", 3, 32, 10, 269_722),
        ("vgg11", 3, 32, 10, 9_228_362),
        ("vit", 3, 32, 10, 541_194),
        ("vit", 1, 8, 10, 529_418),
    ],
)
def test_model_sizes_and_outputs(name, channels, size, classes, parameters):
    model = models.build(name, channels, size, classes)
    count = sum(p.numel() for p in model.parameters())
    assert count == pytest.approx(parameters, rel=0.01 if name == "mlp" else 0)
    assert model(torch.randn(2, channels, size, size)).shape == (2, classes)


@pytest.mark.parametrize(("channels", "size"), [(1, 8), (3, 32)])
def test_cnn_lies_almost_whole_in_large_matrices(channels, size):
    parameters = list(models.build("cnn", channels, size, 10).parameters())
    small = sum(p.numel() for p in parameters if p.dim() < 2 or p.numel() < 1024)
    assert small < 0.01 * sum(p.numel() for p in parameters)


def test_a_language_model_sees_only_the_bytes_before():
    torch.manual_seed(0)
    model = models.build("gpt", 256, 64)
    assert sum(p.numel() for p in model.parameters()) == 252_384
    tokens = torch.randint(256, (2, 20))
    before = model(tokens)
    assert before.shape == (2, 20, 256)
    tokens[:, 12] = (tokens[:, 12] + 1) % 256
    after = model(tokens)
    torch.testing.assert_close(after[:, :12], before[:, :12])
    assert ((after - before)[:, 12:].abs().amax((0, 2)) > 1e-4).all()


def test_unfit_models_are_refused():
    with pytest.raises(ValueError, match="patches of 4 pixels needs a multiple of them, these images have 9"):
        models.build("vit", 1, 9, 10)
    with pytest.raises(ValueError, match="vgg11 needs images of at least 32 pixels, these have 8"):
        models.build("vgg11", 1, 8, 10)
