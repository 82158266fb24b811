"""A byte-level GPT on the source of torch.nn.functional, with DeMo in place of AdamW, under DistributedDataParallel.

    torchrun --nproc-per-node 2 examples/gpt_demo.py --steps 300 --checkpoints /tmp/gpt_demo

Matrices move by orthogonal averages of momentum, embeddings and norms by signs. The optimizer is SGD without momentum,
with AdamW's learning rate and weight decay, and without clipping.
"""

import argparse
from pathlib import Path

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

import hvd_compress

TEXT = torch.frombuffer(bytearray(Path(nn.functional.__file__).read_bytes()), dtype=torch.uint8)
LENGTH, WIDTH = 64, 128


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, 2, nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.head(self.body(self.bytes(x) + self.places.weight, mask, is_causal=True))


def loss_of(model: nn.Module, seed: int) -> torch.Tensor:
    """Cross-entropy of the next byte, on 8 random pieces of the text."""
    begins = torch.randint(len(TEXT) - LENGTH - 1, (8,), generator=torch.Generator().manual_seed(seed))
    pieces = torch.stack([TEXT[begin : begin + LENGTH + 1] for begin in begins]).long()
    return nn.functional.cross_entropy(model(pieces[:, :-1]).flatten(0, 1), pieces[:, 1:].flatten())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--checkpoints", type=Path, required=True)
    options = parser.parse_args()
    distributed.init_process_group("gloo")
    rank, ranks = distributed.get_rank(), distributed.get_world_size()

    torch.manual_seed(0)
    model = GPT()
    optimizer = torch.optim.SGD(model.parameters(), lr=4e-3, weight_decay=0.01)
    compression = hvd_compress.DeMo(model, density=1 / 32, orthogonal="matrices")
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(compression, hvd_compress.ddp_hook)

    parts = {"model": model, "optimizer": optimizer, "compression": compression}
    first, file = 0, options.checkpoints / f"rank-{rank}.pt"
    if file.exists():
        first, states = torch.load(file, weights_only=True)
        for name, part in parts.items():
            part.load_state_dict(states[name])
    for step in range(first, options.steps):
        optimizer.zero_grad()
        loss = loss_of(ddp, step * ranks + rank)
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 50 == 0:
            print(f"step {step}: loss {loss.item():.2f}", flush=True)
    options.checkpoints.mkdir(parents=True, exist_ok=True)
    torch.save((options.steps, {name: part.state_dict() for name, part in parts.items()}), file)

    loss, ratio = loss_of(model, 10**6), compression.stats()["total"]["wire_ratio"]
    print(f"rank {rank}: {options.steps} steps from {first}, loss {loss:.8f}, {ratio:.1f} times fewer bytes")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
