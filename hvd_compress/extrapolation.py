"""Extrapolation of the weights from the last epochs: :class:`~hvd_compress.extrapolation.Line` and
:class:`~hvd_compress.extrapolation.WNN`."""

from .methods.extrapolation import WNN, Extrapolation, Line, Nowcaster
