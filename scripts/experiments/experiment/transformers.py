"""Small transformers: pre-norm blocks (Radford et al. 2019) as a language model and as a vision transformer."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def attention(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
    """Of (n, heads, length, channels). In float32 on a CPU, where backward takes 2.7 times as long in bfloat16."""
    heads = query, key, value
    if not query.is_cpu:
        return F.scaled_dot_product_attention(*heads, is_causal=causal)
    with torch.autocast("cpu", enabled=False):
        return F.scaled_dot_product_attention(*(part.float() for part in heads), is_causal=causal)


class Block(nn.Module):
    """Attention and a two-layer network, each after a norm and added to its input: (n, length, width). Without biases,
    as is usual today: they would travel uncompressed."""

    def __init__(self, width: int, heads: int, hidden: int, causal: bool):
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm1, self.norm2 = nn.LayerNorm(width, bias=False), nn.LayerNorm(width, bias=False)
        self.attention, self.output = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, hidden, bias=False), nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.attention(self.norm1(x)).unflatten(2, (3, self.heads, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4)  # each (n, heads, length, width / heads)
        mixed = attention(query, key, value, self.causal)
        x = x + self.output(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """A language model with learnt positions; the head is the embedding. Maps tokens int64 (n, length), at most
    ``context`` long, to logits (n, length, vocabulary) of the tokens that follow."""

    def __init__(self, vocabulary: int, context: int, width: int, layers: int, heads: int):
        super().__init__()
        self.words, self.positions = nn.Embedding(vocabulary, width), nn.Parameter(torch.empty(context, width))
        self.blocks = nn.Sequential(*(Block(width, heads, 4 * width, causal=True) for _ in range(layers)))
        self.norm = nn.LayerNorm(width, bias=False)
        _initialise(self, layers)

    def forward(self, tokens: Tensor) -> Tensor:
        return F.linear(self.features(tokens), self.words.weight)

    def features(self, tokens: Tensor) -> Tensor:
        """What the head reads: float (n, length, width)."""
        return self.norm(self.blocks(self.words(tokens) + self.positions[: tokens.shape[1]]))


class GPTTagger(GPT):
    """A GPT with another head. Maps tokens int64 (n, length) to logits (n, length, tags) of these tokens."""

    def __init__(self, vocabulary: int, context: int, tags: int, width: int, layers: int, heads: int):
        super().__init__(vocabulary, context, width, layers, heads)
        self.head = nn.Linear(width, tags)
        _initialise(self.head, layers)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.features(tokens))


class ViT(nn.Module):
    """A vision transformer with learnt positions, whose head reads the mean of all patches. Maps (n, c, size, size) to
    logits (n, classes)."""

    def __init__(self, channels: int, size: int, classes: int, patch: int, width: int, layers: int, heads: int):
        super().__init__()
        if size % patch:
            raise ValueError(f"a ViT with patches of {patch} pixels needs a multiple of them, these images have {size}")
        self.patches = nn.Conv2d(channels, width, patch, stride=patch)
        self.positions = nn.Parameter(torch.empty((size // patch) ** 2, width))
        self.blocks = nn.Sequential(*(Block(width, heads, 2 * width, causal=False) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width, bias=False), nn.Linear(width, classes)
        _initialise(self, layers)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        return self.head(self.norm(self.blocks(x)).mean(1))


def _initialise(model: nn.Module, layers: int) -> None:
    """As GPT-2: matrices normal with standard deviation 0.02, smaller where a block adds to its input."""
    for name, parameter in model.named_parameters():
        if parameter.dim() >= 2:
            added = name.endswith(("output.weight", "down.weight"))
            nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if added else 0.02)
        elif name.endswith("bias"):
            nn.init.zeros_(parameter)
