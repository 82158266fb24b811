"""A method of your own: signSGD with momentum and majority vote (Bernstein et al., ICML 2018), one bit per entry.

    torchrun --nproc-per-node 2 examples/custom_method.py --steps 200 --checkpoints /tmp/custom_method

docs/extending.md explains the two classes. They run under Horovod as they are, too.
"""

import argparse
from pathlib import Path

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

import hvd_compress
from hvd_compress.engine.bucket import Bucket
from hvd_compress.engine.collectives import allgather
from hvd_compress.engine.exchange import Exchange
from hvd_compress.engine.work import Step, Work

BITS = 2 ** torch.arange(8, dtype=torch.uint8)


class SignSGDWork(Work):
    """The momentum is in ``bucket.residual``, which checkpoints contain."""

    def begin(self, step: Step) -> None:
        super().begin(step)
        self.bucket.residual.mul_(0.9)
        self.invalid = torch.zeros((), dtype=torch.bool)

    def accumulate(self) -> None:
        for piece, grad in zip(self.bucket.pieces, self.bucket.gradients, strict=True):
            finite = grad.isfinite()  # what is not finite must never enter a state
            self.invalid |= ~finite.all()
            if grad.numel():  # else none arrived
                piece.shaped(self.bucket.residual).add_(torch.where(finite, grad, 0.0) / self.step.scale, alpha=0.1)

    def exchange(self) -> Exchange:
        bucket, step = self.bucket, self.step
        bits = (bucket.residual > 0).view(-1, 8) * BITS
        message = torch.cat([bits.sum(1, dtype=torch.uint8), self.invalid.view(1).to(torch.uint8)])
        rows = (yield allgather(message, "values")).view(step.ranks, -1)
        votes = (rows[:, :-1, None] & BITS).ne(0).sum(0).flatten() * 2 - step.ranks
        average = votes.sign().float() * step.scale
        if rows[:, -1].any():  # on every rank, so that a GradScaler skips the step on every rank
            average.fill_(float("nan"))
        for piece, grad in zip(bucket.pieces, bucket.gradients, strict=True):
            if grad.numel():
                grad.copy_(piece.shaped(average))


class SignSGD(hvd_compress.Compressor):
    def work(self, bucket: Bucket) -> Work:
        return SignSGDWork(bucket)


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
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
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
