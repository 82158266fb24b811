"""Loads the compiled extensions, with the reference as fallback."""

import importlib.util
import inspect
import warnings
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from .. import reference

_PACKAGE = __package__.rpartition(".")[0]
#: Names of all operators.
OPERATORS = (
    *("accumulate", "codebook_mean", "codebook_moments", "codebook_move"),
    *("accumulate_select", "select", "gather", "scatter", "hadamard", "block_means_send", "block_means_keep"),
    *("moments", "lanes_prepare", "lanes_update", "lanes_encode", "lanes_decode"),
    *("codebook_encode", "codebook_decode", "range_encode", "range_decode"),
)


def is_current(name: str, key: str) -> bool:
    """Whether the operator has a kernel for the dispatch key (CPU or CUDA), and the same arguments as its reference,
    which an extension built from other sources may not have."""
    found = getattr(torch.ops.hvd_compress, name, None)
    wanted = list(inspect.signature(getattr(reference, name)).parameters)
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return (
        found is not None
        and [argument.name for argument in found.default._schema.arguments] == wanted
        and has_kernel(f"hvd_compress::{name}", key)
    )


def _load(module: str, key: str) -> str | None:
    """Loads the extension ``module``, with kernels for the dispatch key. Returns None, or why it cannot be used."""
    spec = importlib.util.find_spec(f"{_PACKAGE}.{module}")
    if spec is None or spec.origin is None:
        return "the extension is not built"
    try:
        # The extension is no Python module: loading it registers the operators with torch.
        loader: Any = torch.ops
        loader.load_library(spec.origin)
    except OSError as error:
        return str(error)
    if not all(is_current(name, key) for name in OPERATORS):
        return "the extension was built from other sources: build it again"
    return None


@lru_cache
def check_device(device: torch.device) -> None:
    """Raises ``RuntimeError`` if the CUDA extension was not built for this GPU. Runs one operator, once per device."""
    if device.type != "cuda" or not COMPILED_CUDA:
        return
    try:
        implementation.block_means_keep(*torch.zeros(3, 1, dtype=torch.float32, device=device))
    except RuntimeError as error:
        if "no kernel image" not in str(error):
            raise
        capability = "{}.{}".format(*torch.cuda.get_device_capability(device))
        raise RuntimeError(
            f"hvd_compress: the CUDA operators were not built for {device}, which has compute capability {capability}: "
            f"build hvd_compress again with TORCH_CUDA_ARCH_LIST={capability} in the environment"
        ) from error


def _slow_cuda(function: Callable[..., None], reason: str) -> Callable[..., None]:
    def kernel(*args: Any) -> None:
        warnings.warn(f"hvd_compress: slow PyTorch code for CUDA tensors ({reason})", RuntimeWarning, stacklevel=2)
        function(*args)

    return kernel


def _fake(*args: Any) -> None:
    """Returns nothing: the operators write to their arguments."""


#: Why the operators for CPU and for CUDA tensors cannot be used; None if they can.
MISSING = _load("_C", "CPU")
MISSING_CUDA = MISSING or _load("_C_cuda", "CUDA")
COMPILED: bool = MISSING is None
COMPILED_CUDA: bool = MISSING_CUDA is None
implementation: Any = torch.ops.hvd_compress if COMPILED else reference
#: The instruction set of the CPU operators. torch's variable ``ATEN_CPU_CAPABILITY`` can lower it.
CPU_CAPABILITY: str = {4: "AVX-512", 3: "AVX2", 0: "portable"}[implementation.cpu_level()] if COMPILED else "torch"

if MISSING is not None:
    warnings.warn(f"hvd_compress: slow PyTorch code for all tensors ({MISSING})", RuntimeWarning, stacklevel=2)


# The operators' fakes, and the reference for CUDA tensors if the CUDA extension is missing.
if COMPILED:
    for _name in OPERATORS:
        torch.library.register_fake(f"hvd_compress::{_name}", _fake)
        if MISSING_CUDA is not None:
            _kernel = _slow_cuda(getattr(reference, _name), MISSING_CUDA)
            torch.library.register_kernel(f"hvd_compress::{_name}", "cuda", _kernel)
