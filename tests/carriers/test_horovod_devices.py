"""Where Horovod is given tensors, by how it was built."""

import pytest
import torch

from hvd_compress.carriers import horovod


@pytest.mark.parametrize("built", [False, True])
def test_tensors_of_a_gpu_are_on_the_cpu_for_a_horovod_without_gpu_operations(monkeypatch, built):
    monkeypatch.setattr(horovod, "gpu_operations", lambda: built)
    assert horovod.averaging_device(torch.device("cuda", 1)) == torch.device(*(("cuda", 1) if built else ("cpu",)))
    assert horovod.averaging_device(torch.device("cpu")) == torch.device("cpu")
