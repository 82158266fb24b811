#!/usr/bin/env python3
"""What codecs lose of real gradients: records them in a training, and encodes them.

    bash scripts/run.sh 4 scripts/experiments/gradient_errors.py record --data digits --model cnn --out results/digits
    python scripts/experiments/gradient_errors.py errors results/digits
    python scripts/experiments/gradient_errors.py feedback results/muon [--transform]

record: trains without compression, with train.py's options, and writes `OUT/step000042.rank0.pt` for each rank and
recorded step, a dict: `step`, the number of updates before; `gradients`, name -> the rank's gradient before averaging,
flat, in the parameter's memory order; `shapes` and `strides`, of the parameters. With --local-steps: how far the
weights have come when they are exchanged. Recorded are the parameters that a method compresses.

errors: a rank's gradient is encoded and decoded once, without error feedback: |g - decoded| / |g| over all its tensors.
Bits per entry count what one message holds: codes, and for sparse methods one byte per index. The second table compares
frequencies with entries.

feedback: what hvd_compress.Quantized leaves unsent of tensors that were recorded in sequence (--count). All ranks'
tensors pass the real channels, with error feedback, in one bucket. Root mean squares over all exchanges after the first
six, relative to the exact averages: "error" of one exchange, |applied - exact|; "unsent", the mean of the ranks'
residuals. "residual" is a rank's own, relative to its own tensors. --transform: Walsh-Hadamard coefficients.
"""

import argparse
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import table
import torch
import train
from experiment.files import script_parser
from experiment.hosts import Host
from torch import Tensor

from hvd_compress import ops
from hvd_compress.codecs.coded_ring import CodedRing
from hvd_compress.codecs.floats import RangeFloat
from hvd_compress.codecs.lanes import grid_step
from hvd_compress.codecs.packed import Code, Lloyd, WideLloyd
from hvd_compress.codecs.scales import Moments
from hvd_compress.engine.place import is_large
from hvd_compress.methods import spectrum
from hvd_compress.reference import BLOCK

Gradient = list[Tensor]  # one flat float32 tensor a parameter
ROOM = 2  # bits of a lane for the sum of four ranks
SETTLED = 6  # exchanges


class Recorder:
    """Copies the gradients of large parameters as backward makes them, before anything else sees them; with an
    ``optimizer``, their differences since the last exchange, when it has stepped."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
        self.parameters = {name: p for name, p in model.named_parameters() if is_large(p, 1024)}
        self.gradients: dict[str, Tensor] = {}
        self.begin: dict[str, Tensor] = {}
        self.on = False
        for name, parameter in self.parameters.items() if optimizer is None else ():
            parameter.register_post_accumulate_grad_hook(lambda p, name=name: self._record(name, p.grad))
        if optimizer is not None:
            optimizer.register_step_pre_hook(self._begin)
            optimizer.register_step_post_hook(self._differences)

    def _record(self, name: str, values: Tensor) -> None:
        if self.on:
            like = torch.empty_like(self.parameters[name], device="cpu")
            self.gradients[name] = like.copy_(values).detach().as_strided((values.numel(),), (1,))

    def _begin(self, *_: object) -> None:
        if not self.begin:
            self.begin = {name: p.detach().clone() for name, p in self.parameters.items()}

    def _differences(self, *_: object) -> None:
        for name, p in self.parameters.items():
            self._record(name, p.detach() - self.begin[name])

    def content(self, step: int) -> dict[str, Any]:
        named = self.parameters.items()
        content = {"shapes": {name: tuple(p.shape) for name, p in named}, "strides": {n: p.stride() for n, p in named}}
        return {"step": step, "gradients": self.gradients, **content}


class RecordedRun(train.Run):
    """A run that writes the gradients of the steps at `--moments`."""

    def __init__(self, args: argparse.Namespace, host: Host) -> None:
        super().__init__(args, host)
        last = self.total_steps // self.period - 1
        first = [min(int(moment * (last + 1)), last) for moment in args.moments]
        #: The steps after which there is something to write.
        self.recorded = {self.period * (f + i + 1) - 1 for f in first for i in range(args.count) if f + i <= last}
        args.out.mkdir(parents=True, exist_ok=True)

    def build_compression(self, optimizer: torch.optim.Optimizer) -> Any:
        # Its hooks come before Horovod's.
        self.recorder = Recorder(self.model, optimizer if self.args.local_steps else None)
        return super().build_compression(optimizer)

    def train_step(self, inputs: Tensor, targets: Tensor) -> Tensor:
        step = self.step
        self.recorder.on = step in self.recorded
        loss = super().train_step(inputs, targets)
        if self.recorder.on:
            torch.save(self.recorder.content(step), self.args.out / f"step{step:06d}.rank{self.host.rank}.pt")
        if self.step % self.period == 0:
            self.recorder.begin = {}
        return loss


def parse_record(argv: list[str]) -> argparse.Namespace:
    own = argparse.ArgumentParser(description=__doc__, add_help=False)
    own.add_argument("--out", type=Path, required=True, metavar="DIR", help="write the gradients here")
    moments = dict(type=lambda text: [float(part) for part in text.split(",")], default=[0.05, 0.5, 0.95])
    own.add_argument("--moments", **moments, metavar="LIST", help="shares of all steps")
    own.add_argument("--count", type=int, default=1, help="of consecutive steps or exchanges at each moment")
    args = train.parse(argv, own)
    if args.compression != "none" or not all(0 <= moment <= 1 for moment in args.moments):
        own.error("gradients are recorded without compression, at moments from 0 to 1")
    return args


def load(folder: Path, by_kernel: bool = False) -> dict[int, list[Gradient]]:
    """By step, each rank's gradient, in memory order; ``by_kernel`` puts a filter's taps side by side instead."""
    found: dict[int, list[Gradient]] = {}
    for file in sorted(folder.glob("step*.rank*.pt")):
        saved = torch.load(file, weights_only=True)
        tensors = []
        for name, flat in sorted(saved["gradients"].items()):
            shaped = flat.as_strided(saved["shapes"][name], saved["strides"][name])
            tensors.append(shaped.contiguous().view(-1) if by_kernel else flat)
        found.setdefault(saved["step"], []).append(tensors)
    if not found:
        raise SystemExit(f"{folder} holds no step*.rank*.pt: record them first")
    return found


def relative(error: Tensor, values: Tensor) -> float:
    return float(error.double().norm() / values.double().norm())


def edges_of(tensors: Gradient) -> Tensor:
    return torch.tensor([0, *(tensor.numel() for tensor in tensors)]).cumsum(0)


def coded(code: Code, values: Tensor, edges: Tensor) -> Tensor:
    """The quantization error of a code, with each group's own scale and distribution."""
    scale, kind = code.fitted(Moments(values, edges))
    codes, error = torch.empty(code.size(len(values)), dtype=torch.uint8), torch.empty_like(values)
    code.encode(values, scale.float(), kind, edges, codes, error)
    return error


def lanes(bits: int, stochastic: bool, values: Tensor, edges: Tensor) -> Tensor:
    moments, steps = Moments(values, edges), grid_step(2 ** (bits - 1) - 1, stochastic).double()
    scale = (moments.rms * steps[moments.kind]).clamp(1e-20, 1e20).float()
    words, error = torch.empty(-(-len(values) // (64 // (bits + ROOM))), dtype=torch.int64), torch.empty_like(values)
    ops.lanes_encode(values, scale, edges, words, error, bits, bits + ROOM, 1 if stochastic else -1)
    return error


def qsgd(bits: int, values: Tensor, bucket: int = 512) -> Tensor:
    """Levels of |g| / ||g|| per bucket, rounded at random (Alistarh et al., QSGD, 2017)."""
    rows = torch.nn.functional.pad(values, (0, -len(values) % bucket)).view(-1, bucket)
    level = rows.norm(dim=1, keepdim=True).clamp(min=1e-30) / (2 ** (bits - 1) - 1)
    draw = torch.rand(rows.shape, generator=torch.Generator().manual_seed(1))
    return (rows - (rows / level + draw).floor() * level).view(-1)[: len(values)]


def sparse(gradient: Gradient, each: int, code: Code | None, frequencies: bool) -> float:
    """The error where the ``each`` largest of 256 entries, or Fourier coefficients, are kept; the transform preserves
    norms."""
    dropped, chosen = [], []
    for flat in gradient:
        if frequencies:
            entries, flat = flat, torch.empty(spectrum.padded(flat.numel()))
            spectrum.forward(entries, flat)
        rows = torch.nn.functional.pad(flat.abs(), (0, -len(flat) % BLOCK), value=-1.0).view(-1, BLOCK)
        mask = torch.zeros_like(rows, dtype=torch.bool).scatter_(1, rows.topk(each, dim=1).indices, True)
        mask = mask.view(-1)[: len(flat)]
        dropped.append(flat[~mask])
        chosen.append(flat[mask])
    if code is not None:
        dropped.append(coded(code, torch.cat(chosen), edges_of(chosen)))
    return relative(torch.cat(dropped), torch.cat(gradient))


def methods() -> Iterable[tuple[str, float, Callable[[Gradient], float]]]:
    """Name, bits per entry, relative error of a gradient."""

    def quantizer(error: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Gradient], float]:
        return lambda g: relative(error(torch.cat(g), edges_of(g)), torch.cat(g))

    for bits in (4, 8):
        yield f"QSGD, {bits} bits", bits, quantizer(lambda v, e, b=bits: qsgd(b, v))
    for bits, stochastic in ((2, False), (4, True), (4, False)):
        name, cost = f"lanes{bits}, {'at N = 4' if stochastic else 'to nearest'}", 64 / (64 // (bits + ROOM))
        yield name, cost, quantizer(lambda v, e, b=bits, s=stochastic: lanes(b, s, v, e))
    for code in (Lloyd(2), Lloyd(4), RangeFloat(8), RangeFloat(10)):
        yield code.name, code.bits, quantizer(lambda v, e, c=code: coded(c, v, e))
    yield "lloyd4, one scale", 4, lambda g: relative(coded(Lloyd(4), v := torch.cat(g), edges_of([v])), v)
    for name, frequencies in (("top-k", False), ("FFT", True)):
        cost = 16 / BLOCK * (8 + 4)
        yield f"{name}, 16 of 256, lloyd4", cost, lambda g, f=frequencies: sparse(g, 16, Lloyd(4), f)


def error_table(folders: list[Path]) -> str:
    first = {f"{folder.name}, step {step}": ranks[0] for folder in folders for step, ranks in load(folder).items()}
    return table.markdown(
        [
            {"method": name, "bits": f"{bits:.2f}", **{column: f"{error(g):.4f}" for column, g in first.items()}}
            for name, bits, error in methods()
        ]
    )


def frequency_table(folders: list[Path]) -> str:
    """The error of the 38 best of 256 of rank 0's gradient, in both domains and both orders of memory."""
    rows = []
    for folder in folders:
        for by_kernel in (False, True):
            for step, (gradient, *_) in load(folder, by_kernel).items():
                products = sum(float((t[1:] * t[:-1]).sum()) for t in gradient)
                correlation = products / sum(float(t.square().sum()) for t in gradient)
                rows.append(
                    {
                        "gradients": folder.name,
                        "flattened by": "kernel taps" if by_kernel else "memory order",
                        "step": str(step),
                        "top-k": f"{sparse(gradient, 38, None, False):.4f}",
                        "FFT": f"{sparse(gradient, 38, None, True):.4f}",
                        "lag-1 correlation": f"{correlation:.3f}",
                    }
                )
    return table.markdown(rows, left=2)


def in_sequence(folder: Path) -> tuple[list[Tensor], list[int]]:
    """Each exchange's tensors as a bucket has them, float32, (ranks, n), and their sizes."""

    def padded(tensor: Tensor) -> Tensor:
        return torch.nn.functional.pad(tensor, (0, -tensor.numel() % BLOCK))

    steps = load(folder).values()
    sizes = [-(-tensor.numel() // BLOCK) * BLOCK for tensor in next(iter(steps))[0]]
    return [torch.stack([torch.cat([padded(tensor) for tensor in rank]) for rank in ranks]) for ranks in steps], sizes


def transformed(exchange: Tensor) -> Tensor:
    """Walsh-Hadamard coefficients, which have the norms of the entries."""
    coefficients = exchange.clone()
    ops.hadamard(coefficients.view(-1))
    return coefficients


def averaged(exchanges: list[Any]) -> list[tuple[Tensor, Tensor]]:
    """Runs the averages of all ranks: an alltoall, then an allgather."""
    count, results = len(exchanges), [None] * len(exchanges)
    for verb in ("alltoall", "allgather"):
        requests = [exchange.send(result) for exchange, result in zip(exchanges, results, strict=True)]
        assert {request.verb for request in requests} == {verb}
        if verb == "allgather":
            results = [torch.cat([request.tensor for request in requests])] * count
        else:
            results = list(torch.stack([r.tensor.view(count, -1) for r in requests], 1).flatten(1))
    ended = []
    for exchange, result in zip(exchanges, results, strict=True):
        try:
            exchange.send(result)
        except StopIteration as end:
            ended.append(end.value)
    return ended


def feedback(codec: CodedRing, exchanges: list[Tensor], sizes: list[int]) -> dict[str, str]:
    """A row of the table."""
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
    measured = {"error": error / exact, "unsent": unsent / exact, "residual": held / own}
    (message,) = channels[0].first_requests()
    bits = 4 * (message.tensor.numel() + ranks * message.following[0].tensor.numel()) / sum(sizes)
    return {"bits sent": f"{bits:.2f}", **{name: f"{value:.4f}" for name, value in measured.items()}}


def feedback_table(folder: Path, bits: list[int], mean_bits: int | None, runs: list[int], transform: bool) -> str:
    exchanges, sizes = in_sequence(folder)
    if len(exchanges) <= SETTLED:
        raise SystemExit(f"{folder} holds {len(exchanges)} exchanges; record more than {SETTLED} with --count")
    if transform:
        exchanges = [transformed(exchange) for exchange in exchanges]
    codecs = [CodedRing(WideLloyd(b), run, WideLloyd(mean_bits or b)) for b in bits for run in runs]
    return table.markdown([{"codec": codec.name, **feedback(codec, exchanges, sizes)} for codec in codecs])


def main(argv: list[str]) -> int:
    if argv[:1] == ["record"]:
        return train.main(parse_record(argv[1:]), RecordedRun)
    parser = script_parser(__doc__)
    parser.add_argument("command", choices=("record", "errors", "feedback"))
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--bits", type=int, nargs="+", default=[1, 2, 3, 4, 8], help="of feedback")
    parser.add_argument("--mean-bits", type=int, help="of feedback (default: as --bits)")
    parser.add_argument("--runs", type=int, nargs="+", default=[64, 256, 512, 1024, 4096], help="of feedback")
    parser.add_argument("--transform", action="store_true", help="of feedback")
    args = parser.parse_args(argv)
    if args.command == "errors":
        print(f"Relative error of rank 0's gradient.\n\n{error_table(args.folders)}")
        print(f"\n38 of 256 kept, values exact: relative error.\n\n{frequency_table(args.folders)}")
    else:
        print(feedback_table(args.folders[0], args.bits, args.mean_bits, args.runs, args.transform))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
