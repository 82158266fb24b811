"""A method of your own: signSGD with momentum and majority vote (Bernstein et al., ICML 2018), one bit per entry.

    torchrun --nproc-per-node 2 examples/custom_method.py --steps 200 --checkpoints /tmp/custom_method

docs/your_own_method.md explains the hooks. The class runs under Horovod as it is, too.
"""

import argparse
from pathlib import Path

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

import hvd_compress
from hvd_compress.engine.bucket import Bucket
from hvd_compress.engine.collectives import allgather
from hvd_compress.engine.exchange import Exchange

BITS = 2 ** torch.arange(8, dtype=torch.uint8)


class SignSGD(hvd_compress.Compressor):
    """The momentum is in ``bucket.residual``, which checkpoints contain."""

    def begin(self, bucket: Bucket) -> None:
        bucket.residual.mul_(0.9)
        if bucket.index == 0:
            self.invalid = torch.zeros(len(self.buckets), dtype=torch.bool)

    def receive(self, bucket: Bucket, position: int, grad: Tensor) -> None:
        finite = grad.isfinite()  # what is not finite must never enter a state
        self.invalid[bucket.index] |= ~finite.all()
        bucket.segments[position].shaped(bucket.residual).add_(torch.where(finite, grad, 0.0) / self.scale, alpha=0.1)

    def exchange(self, bucket: Bucket) -> Exchange:
        bits = (bucket.residual > 0).view(-1, 8) * BITS
        message = torch.cat([bits.sum(1, dtype=torch.uint8), self.invalid[bucket.index].view(1).to(torch.uint8)])
        rows = (yield allgather(message, "values")).view(self.ranks, -1)
        votes = (rows[:, :-1, None] & BITS).ne(0).sum(0).flatten() * 2 - self.ranks
        average = votes.sign().float() * self.scale
        if rows[:, -1].any():  # on every rank, so that a GradScaler skips the step on every rank
            average.fill_(float("nan"))
        for segment, target in zip(bucket.segments, bucket.targets(), strict=True):
            if target.numel():
                target.copy_(segment.shaped(average))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--checkpoints", type=Path, required=True)
    options = parser.parse_args()
    distributed.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 10))
    ddp, compression = DistributedDataParallel(model), SignSGD(model.named_parameters())
    ddp.register_comm_hook(compression, hvd_compress.ddp_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=2e-3)
    rank, ranks = compression.rank, compression.ranks
    first, file = 0, options.checkpoints / f"rank-{rank}.pt"
    if file.exists():
        first, *states = torch.load(file, weights_only=True)
        [part.load_state_dict(state) for part, state in zip((model, compression), states, strict=True)]
    for step in range(first, options.steps):
        x = torch.randn(64, 128, generator=torch.Generator().manual_seed(step * ranks + rank))
        optimizer.zero_grad()
        nn.functional.cross_entropy(ddp(x), x[:, :10].argmax(1)).backward()
        optimizer.step()
    options.checkpoints.mkdir(parents=True, exist_ok=True)
    torch.save((options.steps, model.state_dict(), compression.state_dict()), file)
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(10**6))
    loss, ratio = nn.functional.cross_entropy(model(x), x[:, :10].argmax(1)), compression.stats()["total"]["wire_ratio"]
    print(f"rank {rank}: {options.steps} steps from {first}, loss {loss:.8f}, {ratio:.1f} times fewer bytes")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
