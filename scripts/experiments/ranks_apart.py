#!/usr/bin/env python3
"""Take the loss of many ranks' local steps apart: is it the period, the bits, or that each rank normalises its own
noisy gradient, and of which parameters?

    ranks_apart.py            the table in docs/local_steps.md, of stored runs
    ranks_apart.py --train    first simulates what is not stored, about ten minutes a row on one core

A simulation: the weights of all ranks are the first dimension of each tensor, and nothing is sent. It trains the GPT of
docs/choosing.md (1,500 steps of 32 windows, seed 0) by Muon for the hidden matrices and by the sign of the momentum for
the others (embedding, positions, norms), as scripts/experiments/train.py does.
"""

import argparse
import json
import math
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import table
import torch
import torch.nn.functional as F
from experiment import data, models
from experiment.files import script_parser
from experiment.optimizers import learning_rate
from torch import Tensor

from hvd_compress.reference.low_bit import encode, lloyd_max

FILE = Path(__file__).resolve().parents[2] / "docs" / "results" / "ranks-apart" / "runs.jsonl"
STEPS, WARM_UP, WINDOWS, CONTEXT, HEADS = 1500, 100, 32, 64, 4
BETA, DECAY, RUN = 0.95, 0.01, 512
Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Setting:
    """A row. ``others``: None if all parameters take local steps; or the bits in which the gradients of all but the
    hidden matrices are averaged over the ranks in each step, before the ranks normalise them; 0: float32."""

    ranks: int = 16
    rate: float = 4.5e-3
    period: int = 3
    bits: int = 2
    others: int | None = None


SETTINGS = (
    Setting(1, 3e-3, period=1, bits=0),
    Setting(period=1, bits=0),
    Setting(period=1, bits=0, others=0),
    Setting(),
    Setting(rate=6e-3),
    Setting(rate=6e-3, period=2),
    Setting(others=2),
    Setting(others=8),
)


class Sign:
    """Moves by the sign of the Nesterov momentum, as scripts/experiments/train.py does with ``--optimizer muon``."""

    def __init__(self, like: Tensor) -> None:
        self._velocity = torch.zeros_like(like)

    def update(self, gradient: Tensor) -> Tensor:
        return nesterov(self._velocity, gradient).sign()


class Muon:
    """Of each matrix (ranks, m, n), root mean square 1; bfloat16 inside, as is usual."""

    def __init__(self, like: Tensor) -> None:
        self._velocity = torch.zeros_like(like)

    def update(self, gradient: Tensor) -> Tensor:
        x = nesterov(self._velocity, gradient)
        x = (x / x.flatten(1).norm(dim=1).clamp(min=1e-30)[:, None, None]).bfloat16()
        for _ in range(5):
            gram = x @ x.mT
            x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
        return x.float() * max(x.shape[1:]) ** 0.5


def nesterov(velocity: Tensor, gradient: Tensor) -> Tensor:
    velocity.mul_(BETA).add_(gradient)
    return gradient + BETA * velocity


def forward(weights: Weights, tokens: Tensor) -> Tensor:
    """The GPT of :mod:`experiment.transformers`: tokens int64 (ranks, n, length) to logits (ranks, n, length, 256)."""
    ranks, n, length = tokens.shape
    words = weights["words.weight"]
    vocabulary, width = words.shape[1:]
    first = torch.arange(ranks).mul(vocabulary)[:, None, None]

    def norm(x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, (width,)) * weights[name][:, None, None]

    def linear(x: Tensor, name: str) -> Tensor:
        return torch.bmm(x.reshape(ranks, n * length, -1), weights[name].mT).view(ranks, n, length, -1)

    x = F.embedding(tokens + first, words.flatten(0, 1)) + weights["positions"][:, None, :length]
    for block in sorted({name[: len("blocks.0.")] for name in weights if name.startswith("blocks.")}):
        heads = linear(norm(x, f"{block}norm1.weight"), f"{block}attention.weight")
        query, key, value = heads.view(ranks * n, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2)
        x = x + linear(mixed.reshape(ranks, n, length, width), f"{block}output.weight")
        hidden = F.gelu(linear(norm(x, f"{block}norm2.weight"), f"{block}up.weight"))
        x = x + linear(hidden, f"{block}down.weight")
    return linear(norm(x, "norm.weight"), "words.weight")


def gradients(weights: Weights, inputs: Tensor, targets: Tensor) -> Weights:
    """Of each rank's own mean loss."""
    leaves = {name: weight.detach().requires_grad_() for name, weight in weights.items()}
    loss = F.cross_entropy(forward(leaves, inputs).flatten(0, 2), targets.flatten()) * len(inputs)
    return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))


class Feedback:
    """The mean over the ranks in few bits, with error feedback both ways, as :func:`hvd_compress.recipes.low_bit`; of
    tensors of one dimension or less than 1,024 entries as it is."""

    def __init__(self, like: Tensor, bits: int) -> None:
        self._levels = lloyd_max(bits) if bits and like[0].dim() >= 2 and like[0].numel() >= 1024 else None
        self._residuals, self._owners = torch.zeros_like(like), torch.zeros_like(like[0])
        runs, rest = divmod(like[0].numel(), RUN)
        self._lengths = torch.tensor([RUN] * runs + [rest] * bool(rest))

    def mean(self, tensors: Tensor) -> Tensor:
        if self._levels is None:
            return tensors.mean(0)
        wanted = self._residuals + tensors
        sent = torch.stack([self._rounded(tensor) for tensor in wanted])
        self._residuals = wanted - sent
        mean = sent.mean(0) + self._owners
        answer = self._rounded(mean)
        self._owners = mean - answer
        return answer

    def _rounded(self, tensor: Tensor) -> Tensor:
        flat, levels = tensor.flatten(), self._levels
        assert levels is not None
        padded = F.pad(flat, (0, -len(flat) % 8))
        lengths = (
            torch.cat([self._lengths, torch.tensor([len(padded) - len(flat)])]) if len(flat) % 8 else self._lengths
        )
        return encode(padded, lengths, levels, len(lengths))[1][: len(flat)].view_as(tensor)


def simulate(setting: Setting) -> float:
    """Bits per byte of the mean weights at the end."""
    text = data.load("text", None, CONTEXT)
    torch.manual_seed(0)
    model = models.build("gpt", *text.shape)
    matrices = set(models.hidden_matrices(model))
    common = {name: p.detach().clone() for name, p in model.named_parameters()}
    weights = {name: p.expand(setting.ranks, *p.shape).clone() for name, p in common.items()}
    optimizers = {name: (Muon if name in matrices else Sign)(w) for name, w in weights.items()}
    shared = {} if setting.others is None else {n: Feedback(w, setting.others) for n, w in weights.items()}
    for name in matrices & shared.keys():
        del shared[name]
    # What all ranks have in common already is not rounded again.
    progress = {name: Feedback(w, 0 if name in shared else setting.bits) for name, w in weights.items()}
    steps = (b for epoch in range(STEPS // 100) for b in text.train_batches(WINDOWS, 0, 1, 0, epoch))
    for step, batch in enumerate(steps):
        rate = learning_rate(step, setting.rate, WARM_UP, STEPS)
        inputs, targets = (part.view(-1, setting.ranks, CONTEXT).transpose(0, 1) for part in batch)
        for name, gradient in gradients(weights, inputs, targets).items():
            if name in shared:
                gradient = shared[name].mean(gradient).expand_as(gradient)
            weights[name] = weights[name] * (1 - rate * DECAY) - rate * optimizers[name].update(gradient)
        if (step + 1) % setting.period and step + 1 < STEPS:
            continue
        for name, a in common.items():
            common[name] = a + progress[name].mean(weights[name] - a)
            weights[name] = common[name].expand_as(weights[name]).clone()
    return bits_per_byte(common, text)


def bits_per_byte(weights: Weights, text: data.text.Text) -> float:
    total, count, alone = 0.0, 0, {name: w[None] for name, w in weights.items()}
    with torch.no_grad():
        for inputs, targets in text.test_batches(256, 0, 1):
            logits = forward(alone, inputs[None]).flatten(0, 2)
            total += float(F.cross_entropy(logits, targets.flatten(), reduction="sum"))
            count += targets.numel()
    return total / count / math.log(2)


def fewer_bytes(setting: Setting) -> float:
    """Times fewer than dense training sends; scales and tensors that are not compressed count as if they were."""
    model = models.build("gpt", 256, CONTEXT)
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    matrices = sum(sizes[name] for name in models.hidden_matrices(model))
    rest = sum(sizes.values()) - matrices
    local = (setting.bits or 32) / setting.period
    every = local if setting.others is None else setting.others or 32
    return 32 * (matrices + rest) / (matrices * local + rest * every)


def title(setting: Setting) -> str:
    if setting.ranks == 1:
        return "dense"
    values = f"in {setting.bits} bits" if setting.bits else "in float32"
    local = f"every {setting.period} steps {values}" if setting.period > 1 else f"every step {values}"
    if setting.others is None:
        return f"weights {local}"
    return f"matrices {local}; gradients of the others in {f'{setting.others} bits' if setting.others else 'float32'}"


def rows(stored: dict[Setting, float]) -> list[dict[str, str]]:
    """Of the table; "-" where there is no run."""
    dense, lines = stored.get(SETTINGS[0]), []
    for setting in SETTINGS:
        value = stored.get(setting)
        line = {"16 ranks": title(setting), "fewer bytes": f"{fewer_bytes(setting):.0f}"}
        line |= {"learning rate": f"{setting.rate:g}", "bits per byte": "-" if value is None else f"{value:.3f}"}
        line["over dense"] = "-" if value is None or dense is None else f"{value / dense - 1:+.1%}"
        lines.append(line)
    return lines


def main() -> None:
    parser: argparse.ArgumentParser = script_parser(__doc__)
    parser.add_argument("--train", action="store_true", help="simulate what is not stored")
    args = parser.parse_args()
    torch.set_num_threads(1)
    stored = {}
    for line in FILE.read_text().splitlines() if FILE.exists() else []:
        run = json.loads(line)
        stored[Setting(**run["setting"])] = run["bits_per_byte"]
    for setting in SETTINGS if args.train else ():
        if setting not in stored:
            print(setting, file=sys.stderr)
            stored[setting] = simulate(setting)
            FILE.parent.mkdir(parents=True, exist_ok=True)
            with FILE.open("a") as file:
                file.write(json.dumps({"setting": asdict(setting), "bits_per_byte": stored[setting]}) + "\n")
    print(table.markdown(rows(stored), left=1))


if __name__ == "__main__":
    main()
