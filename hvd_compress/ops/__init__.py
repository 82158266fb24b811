"""The compiled operators. Each has the name and the arguments of its specification in :mod:`hvd_compress.reference`.

If the extension is not built, the specification runs instead, slowly, and a warning is given at import. ``COMPILED``
and ``COMPILED_CUDA`` tell whether the operators for CPU and CUDA tensors are compiled, ``CPU_CAPABILITY`` names the
instruction set in use, and :func:`check_device` raises if the CUDA operators were not built for a GPU. ``MISSING`` and
``MISSING_CUDA`` say why operators are not in use; ``OPERATORS`` are their names.

Every operator writes to its arguments and returns None. All tensors are on one device. The compiled operators raise
``RuntimeError`` for a wrong dtype, device, size or range; the reference checks nothing. The contents of index tensors
(``pieces``, ``edges``, ``kind``, ``base``, ``book``) are checked on the CPU only: on CUDA, wrong contents give wrong
values, but no access outside the tensors.
"""

from collections.abc import Callable
from functools import update_wrapper
from typing import ParamSpec

from .. import reference
from ..reference import Draw as Draw
from ._load import (
    COMPILED,
    COMPILED_CUDA,
    CPU_CAPABILITY,
    MISSING,
    MISSING_CUDA,
    OPERATORS,
    check_device,
    implementation,
    is_current,
)

P = ParamSpec("P")


def _operator(specification: Callable[P, None]) -> Callable[P, None]:
    """torch's object for the compiled operator, with the specification's docstring and signature."""
    if not COMPILED:
        return specification
    compiled: Callable[P, None] = getattr(implementation, specification.__name__).default
    return update_wrapper(compiled, specification, assigned=["__doc__"], updated=[])


accumulate = _operator(reference.accumulate)
accumulate_select = _operator(reference.accumulate_select)
select = _operator(reference.select)
gather = _operator(reference.gather)
scatter = _operator(reference.scatter)
hadamard = _operator(reference.hadamard)
block_means_send = _operator(reference.block_means_send)
block_means_keep = _operator(reference.block_means_keep)
moments = _operator(reference.moments)
lanes_prepare = _operator(reference.lanes_prepare)
lanes_update = _operator(reference.lanes_update)
lanes_encode = _operator(reference.lanes_encode)
lanes_decode = _operator(reference.lanes_decode)
codebook_encode = _operator(reference.codebook_encode)
codebook_decode = _operator(reference.codebook_decode)
codebook_mean = _operator(reference.codebook_mean)
codebook_moments = _operator(reference.codebook_moments)
codebook_move = _operator(reference.codebook_move)
range_encode = _operator(reference.range_encode)
range_decode = _operator(reference.range_decode)
