"""Old extensions are found out: hvd_compress/ops/_load.py."""

import pytest

from hvd_compress import ops, reference
from hvd_compress.ops import _load

pytestmark = pytest.mark.skipif(not ops.COMPILED, reason="there is no compiled code")


def test_every_operator_is_looked_at():
    assert sorted(_load._OPERATORS) == sorted(name for name in ops.__all__ if name.islower())
    assert all(_load.is_current(name, "CPU") for name in _load._OPERATORS)


def test_other_arguments_than_the_reference_are_old(monkeypatch):
    monkeypatch.setattr(reference, "put", reference.take)
    assert not _load.is_current("put", "CPU")


def test_an_operator_that_is_missing_is_old(monkeypatch):
    monkeypatch.setattr(reference, "fold", reference.take, raising=False)
    assert not _load.is_current("fold", "CPU")


def test_a_kernel_that_is_missing_is_old():
    """The schema is the CPU extension's: it says nothing of the CUDA one beside it."""
    assert not _load.is_current("take", "XPU")
