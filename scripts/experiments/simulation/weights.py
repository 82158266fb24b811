"""The weights of many models of one kind in one tensor, and the gradients of all of them at once."""

import math
from collections.abc import Sequence
from contextlib import nullcontext
from itertools import accumulate, groupby

import torch
import torch.nn.functional as F
from experiment import models
from experiment.transformers import attention
from torch import Tensor, nn

#: Entries that share a scale.
RUN = 512
HEADS = 4
#: Tokens whose activations a processor still has in its cache when they are read again: with 32,000 a step of the GPT
#: of 2.5 M parameters takes 1.4 times as long.
CACHED = 8192


class Layout:
    """The order of a model's parameters in a vector: tensors that are never compressed, the other ones that are no
    hidden matrices, hidden matrices by shape.

    The second and third are padded with zeros to a multiple of :data:`RUN` entries. ``ValueError`` for a hidden matrix
    of less than 1,024 entries.
    """

    def __init__(self, model: nn.Module) -> None:
        shapes, matrices = {name: p.shape for name, p in model.named_parameters()}, set(models.hidden_matrices(model))
        if small := [name for name in matrices if not is_compressed(shapes[name])]:
            raise ValueError(f"hidden matrices must have two dimensions and 1,024 entries or more: {small}")

        def place(name: str) -> tuple[bool, bool, torch.Size]:
            return name in matrices, is_compressed(shapes[name]), shapes[name]

        self.shapes = {name: shapes[name] for name in sorted(shapes, key=place)}
        self.padded = [-(-s.numel() // RUN) * RUN if is_compressed(s) else s.numel() for s in self.shapes.values()]
        ends, names = list(accumulate(self.padded)), list(self.shapes)
        self.size = ends[-1]
        #: Where what is compressed, and where the hidden matrices begin.
        self.compressed = sum(n for n, s in zip(self.padded, self.shapes.values(), strict=True) if not is_compressed(s))
        self.matrices = self.size - sum(n for n, name in zip(self.padded, names, strict=True) if name in matrices)
        #: Shapes of hidden matrices, and how many of each follow each other.
        stacked = groupby(shape for name, shape in self.shapes.items() if name in matrices)
        self.stacks = [(shape, len(list(group))) for shape, group in stacked]

    def flatten(self, weights: dict[str, Tensor]) -> Tensor:
        """Of tensors (..., *shape), (..., size)."""
        parts = []
        for (name, shape), padded in zip(self.shapes.items(), self.padded, strict=True):
            parts.append(F.pad(weights[name].flatten(-len(shape)), (0, padded - shape.numel())))
        return torch.cat(parts, -1)

    def parameters(self, flat: Tensor) -> dict[str, Tensor]:
        """Views of (ranks, size): by name, (ranks, *shape)."""
        pieces = [(s.numel(), n - s.numel()) for s, n in zip(self.shapes.values(), self.padded, strict=True)]
        views = flat.split([length for pair in pieces for length in pair], dim=1)[::2]
        return {name: view.unflatten(1, shape) for (name, shape), view in zip(self.shapes.items(), views, strict=True)}

    def numbers(self, device: torch.device) -> Tensor:
        """The place in the order of each entry's parameter: int64 (size,)."""
        lengths = torch.tensor(self.padded)
        return torch.arange(len(lengths)).repeat_interleave(lengths, output_size=self.size).to(device)

    def run_lengths(self, start: int) -> list[int]:
        """Of the runs from an entry on, where a parameter begins; without the padding."""
        lengths: list[int] = []
        for end, padded, shape in zip(accumulate(self.padded), self.padded, self.shapes.values(), strict=True):
            if end > start:
                lengths += [min(RUN, shape.numel() - first) for first in range(0, padded, RUN)]
        return lengths


def is_compressed(shape: torch.Size) -> bool:
    """Whether low_bit sends a tensor of this shape in few bits."""
    return len(shape) >= 2 and shape.numel() >= 1024


def forward(weights: dict[str, Tensor], tokens: Tensor) -> Tensor:
    """The GPT of :mod:`experiment.transformers`: tokens int64 (ranks, n, length) to logits (ranks, n, length,
    vocabulary)."""
    ranks, n, length = tokens.shape
    words = weights["words.weight"]
    vocabulary, width = words.shape[1:]
    first = torch.arange(0, ranks * vocabulary, vocabulary, device=tokens.device)[:, None, None]

    def norm(x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, (width,)) * weights[name][:, None, None]

    def linear(x: Tensor, name: str) -> Tensor:
        return torch.bmm(x.reshape(ranks, n * length, -1), weights[name].mT).view(ranks, n, length, -1)

    # Not F.embedding, whose gradient sorts the tokens on CUDA. This one's adds in no fixed order there.
    x = words.flatten(0, 1).index_select(0, (tokens + first).flatten()).view(ranks, n, length, width)
    x = x + weights["positions"][:, None, :length]
    for block in sorted({name[: len("blocks.0.")] for name in weights if name.startswith("blocks.")}):
        heads = linear(norm(x, f"{block}norm1.weight"), f"{block}attention.weight")
        query, key, value = heads.view(ranks * n, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        mixed = attention(query, key, value, causal=True).transpose(1, 2)
        x = x + linear(mixed.reshape(ranks, n, length, width), f"{block}output.weight")
        hidden = F.gelu(linear(norm(x, f"{block}norm2.weight"), f"{block}up.weight"))
        x = x + linear(hidden, f"{block}down.weight")
    return linear(norm(x, "norm.weight"), "words.weight")


def gradients(layout: Layout, flat: Tensor, tokens: Tensor, bfloat16: bool = False) -> Tensor:
    """Of each rank's own mean loss: (ranks, size). ``tokens``: int64 (ranks, n, length + 1)."""
    leaf = flat.detach().requires_grad_()
    for piece in pieces(tokens):
        with torch.autocast(flat.device.type, torch.bfloat16) if bfloat16 else nullcontext():
            logits = forward(layout.parameters(leaf), piece[..., :-1]).flatten(0, 2)
            # The sum over all tokens of all ranks, as a mean over one rank's.
            loss = F.cross_entropy(logits, piece[..., 1:].flatten(), reduction="sum") / tokens[0, :, 1:].numel()
        loss.backward()  # adds to the gradient of earlier pieces
    return leaf.grad


def pieces(tokens: Tensor) -> Sequence[Tensor]:
    """Windows whose gradients are computed together: all, or on a CPU as many as have :data:`CACHED` tokens."""
    ranks, n, length = tokens.shape
    return tokens.split(max(1, CACHED // (ranks * (length - 1))) if tokens.is_cpu else n, dim=1)


@torch.no_grad()
def losses(layout: Layout, flat: Tensor, batches: list[Tensor]) -> Tensor:
    """The mean loss of each model on the same windows, nats: float64 (models,). ``flat``: (models, size);
    ``batches``: int64, each (n, length + 1)."""
    total, weights = flat.new_zeros(len(flat), dtype=torch.float64), layout.parameters(flat)
    for batch in batches:
        tokens = batch.expand(len(flat), *batch.shape)
        logits = forward(weights, tokens[..., :-1]).flatten(0, 2)
        each = F.cross_entropy(logits, tokens[..., 1:].flatten(), reduction="none")
        total += each.view(len(flat), -1).sum(1, dtype=torch.float64)
    return total / math.fsum(batch[:, 1:].numel() for batch in batches)
