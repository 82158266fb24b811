"""Loads the extensions, and says which code runs: theirs, or the reference."""

import importlib.util
import warnings
from collections.abc import Callable
from typing import Any

import torch

from .. import reference

_PACKAGE = __package__.rpartition(".")[0]
#: What came last: an extension without this argument of this operator is an old one.
_NEWEST = ("put", "block_means")


def _load(module: str) -> str | None:
    """Load the extension ``module``, which registers its operators; or say why it could not be."""
    spec = importlib.util.find_spec(f"{_PACKAGE}.{module}")
    if spec is None or spec.origin is None:
        return "it was not built"
    try:
        # Not imported: the extension knows nothing of Python, it only registers operators with torch.
        loader: Any = torch.ops
        loader.load_library(spec.origin)
    except OSError as error:
        return str(error)
    operator, argument = _NEWEST
    found = getattr(torch.ops.hvd_compress, operator, None)
    if found is None or argument not in {a.name for a in found.default._schema.arguments}:
        return "it was built from other sources: build it again"
    return None


def _slow_cuda(function: Callable[..., None], reason: str) -> Callable[..., None]:
    def kernel(*args: Any) -> None:
        warnings.warn(f"hvd_compress: slow PyTorch code for CUDA tensors ({reason})", RuntimeWarning, stacklevel=2)
        function(*args)

    return kernel


def _fake(*args: Any) -> None:
    """Shapes of the results, without computing: there are none, the arguments are mutated."""


_missing = _load("_C")
_missing_cuda = _missing or _load("_C_cuda")
COMPILED: bool = _missing is None
COMPILED_CUDA: bool = _missing_cuda is None
implementation: Any = torch.ops.hvd_compress if COMPILED else reference
#: What the CPU's operators run with; ``ATEN_CPU_CAPABILITY``, torch's own variable, can lower it.
CPU_CAPABILITY: str = {4: "AVX-512", 3: "AVX2", 0: "portable"}[implementation.cpu_level()] if COMPILED else "torch"

if _missing is not None:
    warnings.warn(f"hvd_compress: slow PyTorch code: no extension ({_missing})", RuntimeWarning, stacklevel=2)


def register(*names: str) -> None:
    """What the operators of these names need beside the extension: their fakes, and the reference where CUDA's are
    missing."""
    if not COMPILED:
        return
    for name in names:
        torch.library.register_fake(f"hvd_compress::{name}", _fake)
        if _missing_cuda is not None:
            kernel = _slow_cuda(getattr(reference, name), _missing_cuda)
            torch.library.register_kernel(f"hvd_compress::{name}", "cuda", kernel)
