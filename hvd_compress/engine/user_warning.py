"""Warnings that point at the user's line."""

import sys
import warnings

_INSIDE = {__name__.partition(".")[0], "torch", "horovod"}


def warn_user(text: str) -> None:
    """A ``UserWarning`` at the innermost frame outside this package, torch and Horovod."""
    level, frame = 1, sys._getframe()
    while frame.f_globals.get("__name__", "").partition(".")[0] in _INSIDE and frame.f_back is not None:
        level, frame = level + 1, frame.f_back
    warnings.warn(text, stacklevel=level)
