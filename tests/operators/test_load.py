"""Detection of missing and outdated extensions: hvd_compress/ops/_load.py."""

import importlib.util
from types import SimpleNamespace

import pytest
import torch

from hvd_compress import ops, reference
from hvd_compress.ops import _load


def test_every_operator_is_checked():
    operators = {name for name, value in vars(ops).items() if hasattr(value, "__wrapped__")} - {"check_device"}
    assert sorted(_load.OPERATORS) == sorted(operators)
    assert all(_load.is_current(name, "CPU") for name in _load.OPERATORS)


def test_other_arguments(monkeypatch):
    monkeypatch.setattr(reference, "scatter", reference.gather)
    assert not _load.is_current("scatter", "CPU")


def test_missing_operator(monkeypatch):
    monkeypatch.setattr(reference, "fold", reference.gather, raising=False)
    assert not _load.is_current("fold", "CPU")


def test_missing_kernel():
    """The schema is in the CPU extension; kernels may be missing in the CUDA one."""
    assert not _load.is_current("gather", "XPU")


@pytest.fixture
def gpu(monkeypatch):
    """Checks a CUDA device, emulated on the CPU, with the given operator."""

    def check(block_means_keep):
        monkeypatch.setattr(_load, "implementation", SimpleNamespace(block_means_keep=block_means_keep))
        _load.check_device(torch.device("cuda", 0))

    zeros = torch.zeros
    monkeypatch.setattr(_load, "COMPILED_CUDA", True)
    monkeypatch.setattr(torch, "zeros", lambda *size, dtype, device: zeros(*size, dtype=dtype))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    _load.check_device.cache_clear()
    yield check
    _load.check_device.cache_clear()


def test_unsupported_gpu(gpu):
    def fail(*tensors):
        raise RuntimeError("CUDA error: no kernel image is available for execution on the device")

    for _ in range(2):  # failures are not cached
        with pytest.raises(RuntimeError, match=r"cuda:0, .* 7\.5.* TORCH_CUDA_ARCH_LIST=7\.5"):
            gpu(fail)


def test_success_is_cached(gpu):
    tried = []

    def run(*tensors):
        reference.block_means_keep(*tensors)
        tried.append(tensors)

    gpu(run)
    gpu(run)
    assert len(tried) == 1


def test_no_check_without_cuda(monkeypatch):
    monkeypatch.setattr(_load, "implementation", None)
    _load.check_device(torch.device("cpu"))
    monkeypatch.setattr(_load, "COMPILED_CUDA", False)
    _load.check_device(torch.device("cuda", 7))


def test_without_an_extension_a_warning_says_why(monkeypatch):
    def fail(path):
        raise OSError("undefined symbol")

    monkeypatch.setattr(torch.ops, "load_library", fail)
    spec = importlib.util.spec_from_file_location("hvd_compress.ops._load_again", _load.__file__)
    again = importlib.util.module_from_spec(spec)
    with pytest.warns(RuntimeWarning, match=r"slow PyTorch code for all tensors \(undefined symbol\)"):
        spec.loader.exec_module(again)
    assert again.implementation is reference
    with pytest.warns(RuntimeWarning, match=r"slow PyTorch code for CUDA tensors \(no nvcc\)"):
        _load._slow_cuda(lambda: None, "no nvcc")()
