"""stats() against the network interface: run by tests/test_netlab.py in a four-host netlab.

Prints one line per method and rank: the bytes per step according to stats() and to the interface's counter, their
ratio, and the ratio of a dense float32 ring allreduce to the counter. Nothing is subtracted from the counter: the
difference to stats() is transport headers and Horovod's negotiation.
"""

import json
from pathlib import Path

import horovod.torch as hvd
import torch
from horovod_job import barrier

import hvd_compress

STEPS = 10


def sent() -> int:
    return int(Path("/sys/class/net/eth0/statistics/tx_bytes").read_text())


def measure(label: str, **options) -> dict[str, object]:
    torch.manual_seed(0)
    # So large that Horovod's negotiation, which depends on time, is small in comparison.
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
            # All ranks have finished the last step before any rank reads its counter.
            barrier()
            before, claimed = sent(), compression.stats()["total"]["wire_bytes"]
        loss = sum((p * n).sum() for p, n in zip(model.parameters(), noise, strict=True))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    barrier()
    counted = (sent() - before) / STEPS
    stats = compression.stats()
    claimed = (stats["total"]["wire_bytes"] - claimed) / STEPS
    return {
        "method": label,
        "rank": hvd.rank(),
        "stats_bytes": claimed,
        "tx_bytes": counted,
        "tx_to_stats": counted / claimed,
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
