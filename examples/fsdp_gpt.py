"""A byte-level GPT on the source of torch.nn.functional, sharded inside nodes by FSDP2, with DeMo between nodes (HSDP).

    torchrun --nproc-per-node 4 examples/fsdp_gpt.py --steps 300 --checkpoints /tmp/fsdp_gpt

Two nodes of two ranks, on one machine. Gradients are averaged densely inside a node; every rank then exchanges its
shards with the same shards of the other node. The optimizer is SGD without momentum, with AdamW's learning rate.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

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
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--checkpoints", type=Path, required=True)
    options = parser.parse_args()
    distributed.init_process_group("gloo")
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    mesh = init_device_mesh("cpu", (options.nodes, ranks // options.nodes), mesh_dim_names=("replicate", "shard"))

    torch.manual_seed(0)
    model = GPT()
    for layer in model.body.layers:
        fully_shard(layer, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, weight_decay=0.01)
    compression = hvd_compress.DeMo(model, density=1 / 32, process_group=mesh.get_group("replicate"))
    hvd_compress.register_fsdp_hooks(model, compression)

    state = {"model": model, "compression": hvd_compress.DCPState(compression)}
    saved = [(options.checkpoints / ".metadata").exists()]
    distributed.broadcast_object_list(saved)  # rank 0 decides
    if saved[0]:
        dcp.load(state, checkpoint_id=options.checkpoints)
    first = compression.step
    for step in range(first, options.steps):
        optimizer.zero_grad()
        loss = loss_of(model, step * ranks + rank)
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 50 == 0:
            print(f"step {step}: loss {loss.item():.2f}", flush=True)
    dcp.save(state, checkpoint_id=options.checkpoints)

    loss, ratio = loss_of(model, 10**6), compression.stats()["total"]["wire_ratio"]
    text = f"{options.steps} steps from {first}, loss {loss:.8f}, {ratio:.1f} times fewer bytes between nodes"
    print(f"rank {rank}: {text}")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
