"""A model for tests of the command line, as ``--model``: a convolution, a norm, layers with and without padding, one
too small to be compressed."""

from torch import nn

TINY = f"{__file__}:tiny"
TINY_SHAPES = [(32, 16, 3, 3), (32,), (32,), (32,), (301, 288), (301,), (256, 301), (256,), (3, 256), (3,)]


def tiny():
    layers = nn.Linear(288, 301), nn.Linear(301, 256), nn.Linear(256, 3)
    return nn.Sequential(nn.Conv2d(16, 32, 3), nn.BatchNorm2d(32), *layers)
