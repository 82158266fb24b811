"""A rank of ``doctor``: exit status 1 unless a compressed and an uncompressed gradient are averaged."""

import sys

import torch

from ..methods.iwp import IWP
from .ranks import start

STEPS = 3


def main(host: str) -> None:
    ranks = start(host)
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64)
    # The weight is sent whole and not rounded, so its average is known. The bias is not compressed.
    compression = IWP(model.named_parameters(), density=1.0, values="fp32")
    module, optimizer = ranks.wrap(model, torch.optim.SGD(model.parameters(), lr=0.01), compression)
    want, wrong = (ranks.size + 1) / 2, []
    for step in range(STEPS):
        optimizer.zero_grad()
        # The gradient of every entry is rank + 1.
        (module(torch.ones(1, 64, dtype=torch.float32, device="cpu")).sum() * (ranks.rank + 1)).backward()
        ranks.synchronize(optimizer)
        for name, parameter in model.named_parameters():
            if parameter.grad is None or not torch.allclose(parameter.grad, torch.full_like(parameter, want)):
                wrong.append(f"step {step}: the average of {name} is not {want}: {parameter.grad}")
        ranks.update(optimizer)
    everyone = ranks.gather([p.tolist() for p in model.parameters()])
    if any(weights != everyone[0] for weights in everyone):
        wrong.append("weights differ between ranks")
    if ranks.size < 2:
        wrong.append("a launcher started single ranks that do not know of each other")
    for text in wrong:
        print(f"hvd-compress: {text}", file=sys.stderr)
    ranks.close(1 if wrong else 0)


if __name__ == "__main__":
    main(sys.argv[1])
