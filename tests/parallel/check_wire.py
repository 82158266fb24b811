"""stats() against the network interface: run by tests/test_netlab.py in a four-host netlab.

Prints a line a method: bytes that stats() says a rank sent per step, bytes that its interface counted, their ratio,
and how many times more the gradients themselves would be on a ring, by its formula, than what the interface counted.
What is taken off the interface's count: nothing. What remains between them is transport headers and Horovod's
negotiation.
"""

import json
from pathlib import Path

import horovod.torch as hvd
import torch

import hvd_compress

STEPS = 10


def sent() -> int:
    return int(Path("/sys/class/net/eth0/statistics/tx_bytes").read_text())


def measure(label: str, **options) -> dict[str, object]:
    torch.manual_seed(0)
    # Large enough that what Horovod says to agree on a step, which goes by time, is small beside it.
    layers = [torch.nn.Linear(1024, 1024) for _ in range(16)] + [torch.nn.Conv2d(64, 1024, 3), torch.nn.Linear(31, 77)]
    model = torch.nn.ModuleList(layers)
    compression = hvd_compress.IWP(model.named_parameters(), **options)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.0), named_parameters=model.named_parameters(), compression=compression
    )
    data = torch.Generator().manual_seed(hvd.rank())
    noise = [torch.randn(p.shape, generator=data) for p in model.parameters()]
    for step in range(2 + STEPS):
        if step == 2:
            # Every rank is through the last step before any rank reads its counter.
            hvd.barrier()
            before, said = sent(), compression.stats()["total"]["wire_bytes"]
        loss = sum((p * n).sum() for p, n in zip(model.parameters(), noise, strict=True))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    hvd.barrier()
    counted = (sent() - before) / STEPS
    stats = compression.stats()
    said = (stats["total"]["wire_bytes"] - said) / STEPS
    return {
        "method": label,
        "rank": hvd.rank(),
        "stats_bytes": said,
        "tx_bytes": counted,
        "tx_to_stats": counted / said,
        "wire_ratio": stats["last"]["wire_ratio"],
        "dense_to_tx": stats["last"]["dense_bytes"] / counted,
    }


def main() -> None:
    torch.set_num_threads(1)
    hvd.init()
    for label, options in {
        "iwp 1/32": dict(),
        "iwp 1/64 fp16": dict(density=1 / 64, values="fp16"),
        "iwp 1/64 fp32": dict(density=1 / 64, values="fp32"),
        "iwp 1/16 lloyd4": dict(density=1 / 16, values="lloyd4"),
        "dense": dict(density=1.0, values="fp32", block_means=False),
    }.items():
        row = measure(label, budget_interval=0, **options)
        for other in hvd.allgather_object(row):
            if hvd.rank() == 0:
                print("wire " + json.dumps(other), flush=True)
    hvd.shutdown()


if __name__ == "__main__":
    main()
