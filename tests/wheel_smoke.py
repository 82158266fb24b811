"""Smoke test of an installed wheel, without a compiler on PATH. Started by scripts/wheel.sh under torchrun."""

import importlib.metadata
import os
import shutil
import sys
from pathlib import Path

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

import hvd_compress
from hvd_compress import ops, reference


def check_installation() -> None:
    home = Path(hvd_compress.__file__).parent
    assert "site-packages" in home.parts, f"not the installed package: {home}"
    assert not any(map(shutil.which, ("c++", "g++", "gcc", "cc", "clang", "nvcc", "ninja"))), "a compiler is on PATH"
    assert hvd_compress.__version__ == importlib.metadata.version("hvd_compress")
    assert (home / "py.typed").exists() and list((home / "weights").iterdir())
    assert ops.COMPILED, "the compiled operators did not load"
    want = "_C_cuda.abi3.so" in {path.name for path in home.iterdir()}
    assert want == (os.environ.get("HVD_COMPRESS_CUDA") == "1"), "the wheel has the wrong operators"
    if want and torch.version.cuda:
        assert ops.COMPILED_CUDA, "the CUDA operators did not load"


def check_operators() -> None:
    compiled = torch.randn(1024)
    specification = compiled.clone()
    ops.hadamard(compiled)
    reference.hadamard(specification)
    assert torch.equal(compiled, specification)


def check_training(build, lr: float, steps: int = 60) -> str:
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8))
    ddp, compression = DistributedDataParallel(model), build(model.named_parameters())
    ddp.register_comm_hook(compression, hvd_compress.ddp_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    losses = []
    for step in range(steps):
        x = torch.randn(64, 64, generator=torch.Generator().manual_seed(step * ranks + rank))
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(ddp(x), x[:, :8].argmax(1))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    everyone = [torch.empty_like(weights) for _ in range(ranks)]
    distributed.all_gather(everyone, weights)
    assert all(torch.equal(weights, other) for other in everyone), "replicas differ"
    first, last, ratio = sum(losses[:5]) / 5, sum(losses[-5:]) / 5, compression.stats()["total"]["wire_ratio"]
    assert last < 0.9 * first and ratio > 5, (first, last, ratio)
    return f"{type(compression).__name__}: loss {first:.3f} to {last:.3f}, {ratio:.1f} times fewer bytes"


def main() -> None:
    distributed.init_process_group("gloo")
    check_installation()
    check_operators()
    methods = (hvd_compress.IWP, 0.2), (hvd_compress.FFT, 0.2), (hvd_compress.DeMo, 2e-3), (hvd_compress.PowerSGD, 0.2)
    for build, lr in methods:
        line = check_training(build, lr)
        if distributed.get_rank() == 0:
            print(line)
    if distributed.get_rank() == 0:
        print(f"hvd_compress {hvd_compress.__version__} with torch {torch.__version__}: ok")
    distributed.destroy_process_group()
    # Gloo's threads in torch 2.14 may outlive the group and then abort the interpreter's shutdown: skip the shutdown.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
