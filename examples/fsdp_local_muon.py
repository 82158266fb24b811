"""FSDP2 inside nodes, local steps of Muon and AdamW between them: a loop as torchtitan's, by plain torch.

    torchrun --nproc-per-node 4 examples/fsdp_local_muon.py --steps 300 --checkpoints /tmp/fsdp_local_muon

Two nodes of two ranks, on one machine. They exchange how far their weights have come every third step, in 2 bits.
"""

import argparse
from pathlib import Path

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import hvd_compress

TEXT = torch.frombuffer(bytearray(Path(nn.functional.__file__).read_bytes()), dtype=torch.uint8)
LENGTH, WIDTH, PASSES = 64, 128, 2


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
    """Cross-entropy of the next byte, on 4 random pieces of the text."""
    begins = torch.randint(len(TEXT) - LENGTH - 1, (4,), generator=torch.Generator().manual_seed(seed))
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

    with torch.device("meta"):
        model = GPT()
    for block in [*model.body.layers, model]:
        fully_shard(block, mesh=mesh["shard"])
    model.to_empty(device="cpu")
    random = torch.Generator().manual_seed(mesh.get_local_rank("shard"))  # equal shards on all nodes
    for name, p in model.named_parameters():
        values = p.detach().to_local()
        values.normal_(0, 0.02, generator=random) if p.dim() == 2 else values.fill_("norm" in name and "weight" in name)
    matrices, others = hvd_compress.hidden_matrices(model)
    muon = torch.optim.Muon(matrices.values(), lr=3e-3, adjust_lr_fn="match_rms_adamw")  # learning rates as AdamW's
    adamw = torch.optim.AdamW(others.values(), lr=3e-3)
    local = hvd_compress.recipes.low_bit(model, [muon, adamw], process_group=mesh.get_group("replicate"))

    parts = {"model": model, "muon": muon, "adamw": adamw, "compression": local.compression}
    first, file = 0, options.checkpoints / f"rank-{rank}.pt"  # between exchanges the weights differ: one of every rank
    if file.exists():
        first, states = torch.load(file, weights_only=True)
        for name, part in parts.items():
            part.load_state_dict(states[name])
    for step in range(first, options.steps):
        model.zero_grad()
        for number in range(PASSES):
            model.set_requires_gradient_sync(number == PASSES - 1)
            (loss_of(model, (step * PASSES + number) * ranks + rank) / PASSES).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for part in (muon, adamw, local):
            part.step()
    options.checkpoints.mkdir(parents=True, exist_ok=True)
    torch.save((options.steps, {name: part.state_dict() for name, part in parts.items()}), file)
    ratio = local.compression.stats()["total"]["wire_ratio"]
    local.finish(model)  # the average of all nodes, for testing
    loss = loss_of(model, 10**6)
    print(f"rank {rank}: {options.steps} steps from {first}, loss {loss:.8f}, {ratio:.1f} times fewer bytes")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
