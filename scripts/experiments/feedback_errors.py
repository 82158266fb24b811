#!/usr/bin/env python3
"""What hvd_compress.Quantized leaves unsent, on differences or gradients that record_gradients.py recorded in sequence.

    python scripts/experiments/record_gradients.py --host threads --data text --model gpt --optimizer muon --lr 3e-3 \\
        --epochs 15 --batch-size 8 --local-steps 8 --max-steps 480 --moments 0.4 --count 20 --out /tmp/muon
    python scripts/experiments/feedback_errors.py /tmp/muon

All ranks' tensors pass the real channels, with error feedback, in one bucket. Root mean squares over all exchanges
after the first six, relative to the exact averages: "error" of one exchange, |applied - exact|; "unsent", the mean of
the ranks' residuals. "residual" is a rank's own, relative to its own tensors. With --transform, Walsh-Hadamard
coefficients of blocks of 256 entries are encoded in place of the entries."""

from pathlib import Path

import gradient_errors
import table
import torch
from experiment.files import script_parser
from torch import Tensor

from hvd_compress import ops
from hvd_compress.codecs.base import Averaged
from hvd_compress.codecs.coded_ring import CodedRing
from hvd_compress.codecs.packed import WideLloyd
from hvd_compress.engine.collectives import Request
from hvd_compress.reference import BLOCK

SETTLED = 6  # exchanges


def load(folder: Path) -> tuple[list[Tensor], list[int]]:
    """Each exchange's tensors as a bucket has them, float32, (ranks, n), and their sizes."""
    steps = gradient_errors.load(folder).values()
    sizes = [-(-tensor.numel() // BLOCK) * BLOCK for tensor in next(iter(steps))[0]]
    return [torch.stack([torch.cat([padded(tensor) for tensor in rank]) for rank in ranks]) for ranks in steps], sizes


def padded(tensor: Tensor) -> Tensor:
    return torch.nn.functional.pad(tensor, (0, -tensor.numel() % BLOCK))


def transformed(exchange: Tensor) -> Tensor:
    """Walsh-Hadamard coefficients, which have the norms of the entries."""
    coefficients = exchange.clone()
    ops.hadamard(coefficients.view(-1))
    return coefficients


def carried_out(requests: list[Request]) -> list[Tensor]:
    """The result of a collective on each rank."""
    if requests[0].verb == "allgather":
        return [torch.cat([request.tensor for request in requests])] * len(requests)
    parts = [request.tensor.view(len(requests), -1) for request in requests]
    return [torch.cat([part[rank] for part in parts]) for rank in range(len(requests))]


def averaged(exchanges: list[Averaged]) -> list[tuple[Tensor, Tensor]]:
    """Runs the averages of all ranks."""
    results: list[Tensor] | list[None] = [None] * len(exchanges)
    while True:
        requests, done = [], []
        for exchange, result in zip(exchanges, results, strict=True):
            try:
                requests.append(exchange.send(result))
            except StopIteration as end:
                done.append(end.value)
        if done:
            return done
        results = carried_out(requests)


def measure(codec: CodedRing, exchanges: list[Tensor], sizes: list[int]) -> dict[str, str]:
    ranks = len(exchanges[0])
    channels = [codec.channel(len(sizes), ranks, rank, torch.device("cpu")) for rank in range(ranks)]
    for channel in channels:
        channel.set_group_sizes(sizes)
    residual, valid, norms = torch.zeros_like(exchanges[0]), torch.zeros(1, dtype=torch.int32), []
    for own in exchanges:
        exact, values = own.double().mean(0), residual + own
        results = averaged([c.average(v, valid, 0) for c, v in zip(channels, values, strict=True)])
        residual = torch.stack([error for _, error in results])
        parts = results[0][0] - exact, residual.double().mean(0), exact, residual, own
        norms.append(torch.stack([part.double().norm() for part in parts]))
    error, unsent, exact, held, own = torch.stack(norms[SETTLED:]).square().sum(0).sqrt().tolist()
    size = codec.message_size(sizes, ranks) * ranks * 8 / sum(sizes)
    measured = {"error": error / exact, "unsent": unsent / exact, "residual": held / own}
    return {"bits sent": f"{size:.2f}", **{name: f"{value:.4f}" for name, value in measured.items()}}


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--bits", type=int, nargs="+", default=[1, 2, 3, 4, 8])
    parser.add_argument("--runs", type=int, nargs="+", default=[64, 256, 512, 1024, 4096])
    parser.add_argument("--transform", action="store_true")
    args = parser.parse_args()
    exchanges, sizes = load(args.folder)
    if len(exchanges) <= SETTLED:
        raise SystemExit(f"{args.folder} holds {len(exchanges)} exchanges; record more than {SETTLED} with --count")
    if args.transform:
        exchanges = [transformed(exchange) for exchange in exchanges]
    print(f"{len(exchanges)} exchanges of {len(exchanges[0])} ranks, {sum(sizes):,} entries.\n")
    codecs = [CodedRing(WideLloyd(bits), run) for bits in args.bits for run in args.runs]
    print(table.markdown([{"codec": c.name, **measure(c, exchanges, sizes)} for c in codecs]))


if __name__ == "__main__":
    main()
