#!/usr/bin/env python3
"""Bytes that a rank sends in a step, from 2 to 1024 ranks: counted up to 16, and by formulas that the counts verify.

    python scripts/lab/scaling.py --json docs/results/scaling/runs.jsonl/scaling

Ranks are threads of this process. Counted is ``stats()["last"]["wire_bytes"]`` of rank 0's third step: every tensor
that it hands to a collective, times what the collective's algorithm sends of it. More ranks are computed by the
formulas of formulas.py. Exit status 1 where a formula and a count differ by 1 % or more."""

import copy
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "experiments"))

import table
import torch
from experiment import metrics
from experiment.files import script_parser
from experiment.result_file import run_path, write_run
from formulas import FORMULAS, sent_by

from hvd_compress.carriers.threads import ThreadWorld
from hvd_compress.cli.methods import METHODS

COUNTED, MODELLED, PRINTED = (2, 4, 8, 16), (64, 256, 1024), (2, 4, 16, 64, 1024)
ALLOWED = 0.01


def modelled(method: str, model: torch.nn.Module, density: float | None, ranks: int) -> float:
    return sent_by(method, [p.shape for p in model.parameters()], ranks, density)


def counted(method: str, model: torch.nn.Module, density: float | None, ranks: int) -> float:
    world = ThreadWorld(ranks, timeout=300)
    options = {} if density is None else {"density": density}

    def train(rank: int) -> float:
        mine, generator = copy.deepcopy(model), torch.Generator().manual_seed(rank)
        compression = METHODS[method].build(mine.named_parameters(), collectives=world.collectives(rank), **options)
        for _ in range(3):
            for p in mine.parameters():
                p.grad = torch.randn(p.shape, generator=generator)
            # Uncompressed tensors are counted when they are handed over; their average is not needed here.
            for payload, context in [compression.compress(p.grad) for p in mine.parameters()]:
                compression.decompress(payload, context)
        return float(compression.stats()["last"]["wire_bytes"])

    return world.run(train)[0]


def network() -> torch.nn.Module:
    conv, linear = torch.nn.Conv2d, torch.nn.Linear
    return torch.nn.ModuleList(
        [conv(64, 128, 3), conv(128, 256, 3), conv(256, 128, 3), linear(1152, 256), linear(256, 100)]
        + [torch.nn.BatchNorm2d(width) for width in (128, 256, 128)]
    )


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--json", type=run_path, metavar="FILE.jsonl/NAME")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, found, worst, rows = network(), {}, dict.fromkeys(COUNTED, 0.0), []
    for method, (density, _) in FORMULAS.items():
        bytes_of = {n: counted(method, model, density, n) for n in COUNTED}
        for n, count in bytes_of.items():
            worst[n] = max(worst[n], abs(modelled(method, model, density, n) / count - 1))
        bytes_of |= {n: modelled(method, model, density, n) for n in MODELLED}
        ratios = [modelled("dense", model, None, n) / count for n, count in bytes_of.items()]
        found[method] = {"density": density or 1.0, "bytes": bytes_of, "dense_over_bytes": ratios}
        texts = {n: f"{count:,.0f} ({ratio:.3g})" for (n, count), ratio in zip(bytes_of.items(), ratios, strict=True)}
        cells = {f"N = {n}": texts[n] for n in PRINTED}
        rows.append({"method": method, "density": f"1/{1 / density:g}" if density else "1", **cells})
    print(
        f"{sum(p.numel() for p in model.parameters()):,} parameters; bytes a rank sends (dense ring / this);", end=" "
    )
    print(f"N = {' and '.join(map(str, MODELLED))} by formula\n\n{table.markdown(rows)}")
    print("\nLargest relative difference of formula and count: " + ", ".join(f"N = {n} {worst[n]:.4%}" for n in worst))
    write_run(args.json, {"config": metrics.environment(), "counted": COUNTED, "difference": worst, "methods": found})
    sys.exit(max(worst.values()) >= ALLOWED)


if __name__ == "__main__":
    main()
