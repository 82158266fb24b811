"""Loads the extensions, and says which code runs: theirs, or the reference."""

import importlib.util
import inspect
import warnings
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from .. import reference

_PACKAGE = __package__.rpartition(".")[0]
_OPERATORS = (
    "accumulate_select",
    "select",
    "gather",
    "scatter",
    "block_means_send",
    "block_means_keep",
    "moments",
    "lanes_prepare",
    "lanes_update",
    "lanes_encode",
    "lanes_decode",
    "codebook_encode",
    "codebook_decode",
    "range_encode",
    "range_decode",
)


def is_current(name: str, key: str) -> bool:
    """Whether a kernel for the dispatch key, CPU or CUDA, is there, and its operator's arguments are its reference's:
    a file that was built from other sources may have others."""
    found = getattr(torch.ops.hvd_compress, name, None)
    wanted = list(inspect.signature(getattr(reference, name)).parameters)
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return (
        found is not None
        and [argument.name for argument in found.default._schema.arguments] == wanted
        and has_kernel(f"hvd_compress::{name}", key)
    )


def _load(module: str, key: str) -> str | None:
    """Load the extension ``module``, which registers its operators' kernels for a dispatch key; or say why it could not
    be."""
    spec = importlib.util.find_spec(f"{_PACKAGE}.{module}")
    if spec is None or spec.origin is None:
        return "it was not built"
    try:
        # Not imported: the extension knows nothing of Python, it only registers operators with torch.
        loader: Any = torch.ops
        loader.load_library(spec.origin)
    except OSError as error:
        return str(error)
    if not all(is_current(name, key) for name in _OPERATORS):
        return "it was built from other sources: build it again"
    return None


@lru_cache
def check_device(device: torch.device) -> None:
    """Raises ``RuntimeError`` where the CUDA extension has no code for this GPU: it loads all the same, and then every
    operator would fail. One is tried, once a device; on others than GPUs this costs nothing."""
    if device.type != "cuda" or not COMPILED_CUDA:
        return
    mean, quantization_error, unsent = torch.zeros(3, 1, device=device).unbind()
    try:
        implementation.block_means_keep(mean, quantization_error, unsent)
    except RuntimeError as error:
        if "no kernel image" not in str(error):
            raise
        capability = "{}.{}".format(*torch.cuda.get_device_capability(device))
        raise RuntimeError(
            f"hvd_compress: the CUDA operators do not run on {device}, of compute capability {capability}. Were they "
            f"built for other GPUs? Build hvd_compress again with TORCH_CUDA_ARCH_LIST={capability} in the environment"
        ) from error


def _slow_cuda(function: Callable[..., None], reason: str) -> Callable[..., None]:
    def kernel(*args: Any) -> None:
        warnings.warn(f"hvd_compress: slow PyTorch code for CUDA tensors ({reason})", RuntimeWarning, stacklevel=2)
        function(*args)

    return kernel


def _fake(*args: Any) -> None:
    """Shapes of the results, without computing: there are none, the arguments are mutated."""


_missing = _load("_C", "CPU")
_missing_cuda = _missing or _load("_C_cuda", "CUDA")
COMPILED: bool = _missing is None
COMPILED_CUDA: bool = _missing_cuda is None
implementation: Any = torch.ops.hvd_compress if COMPILED else reference
#: What the CPU's operators run with; ``ATEN_CPU_CAPABILITY``, torch's own variable, can lower it.
CPU_CAPABILITY: str = {4: "AVX-512", 3: "AVX2", 0: "portable"}[implementation.cpu_level()] if COMPILED else "torch"

if _missing is not None:
    warnings.warn(f"hvd_compress: slow PyTorch code: no extension ({_missing})", RuntimeWarning, stacklevel=2)


# What operators need beside the extension: their fakes, and the reference where CUDA's are missing.
if COMPILED:
    for _name in _OPERATORS:
        torch.library.register_fake(f"hvd_compress::{_name}", _fake)
        if _missing_cuda is not None:
            _kernel = _slow_cuda(getattr(reference, _name), _missing_cuda)
            torch.library.register_kernel(f"hvd_compress::{_name}", "cuda", _kernel)
