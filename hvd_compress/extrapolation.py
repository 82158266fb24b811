"""Extrapolation of the weights: see :mod:`hvd_compress.methods.extrapolation`."""

from .methods.extrapolation import WNN, Extrapolation, Line, Nowcaster
