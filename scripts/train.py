#!/usr/bin/env python3
"""Train a network over Horovod with a compression method, and write what it cost and reached as JSON.

    mpirun -np 4 python scripts/train.py --data digits --model cnn --compression iwp --density 1/64

`train.py --compression METHOD --help` also shows the options of that method.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from experiment import compressors, metrics, models
from experiment import data as datasets
from experiment.trace import Trace
from tqdm import tqdm  # type: ignore[import-untyped]

from hvd_compress.methods import extrapolation

Batch = tuple[torch.Tensor, torch.Tensor]
EXTRAPOLATIONS = {"wnn": extrapolation.WNN, "line": extrapolation.Line}


def parse(argv: list[str], more: argparse.ArgumentParser | None = None) -> argparse.Namespace:
    """The options of a run, and those of `more`, which a script that builds on this one brings."""
    # The method comes first: it decides which further options there are.
    method = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    method.add_argument("--compression", choices=compressors.METHODS, default="none")
    chosen = method.parse_known_args(argv)[0].compression

    parser = argparse.ArgumentParser(
        description=more.description if more else __doc__,
        parents=[method, more] if more else [method],
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--data", choices=datasets.DATASETS, default="digits")
    parser.add_argument("--data-dir", type=Path, help=f"folder that holds {datasets.CIFAR_FOLDER}/")
    parser.add_argument("--model", choices=models.MODELS, default="cnn")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=32, help="images per rank and backward pass")
    parser.add_argument("--backward-passes-per-step", type=int, default=1, metavar="N")
    parser.add_argument("--lr", type=float, default=0.1, help="peak learning rate, for the global batch")
    parser.add_argument("--lr-warmup-epochs", type=float, default=1, help="epochs of linear rise; then a cosine to 0")
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--weight-decay", type=float, default=5e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--extrapolate", choices=sorted(EXTRAPOLATIONS), help="let the weights jump five epochs ahead after every fifth"
    )
    parser.add_argument("--no-augment", action="store_true")
    parser.add_argument("--amp", choices=("off", "bf16"), default="off")
    parser.add_argument("--channels-last", action="store_true")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--limit-train", type=int, metavar="N", help="train on N images only")
    parser.add_argument("--max-steps", type=int, metavar="N", help="stop after N steps")
    parser.add_argument(
        "--eval-every", type=float, default=1, metavar="N", help="epochs between tests, 0.25 say; the end is tested"
    )
    # Under mpirun a rank's stderr is a pipe even on a terminal, so there the bar has to be asked for.
    parser.add_argument(
        "--progress",
        action=argparse.BooleanOptionalAction,
        help="a progress bar; by default where stderr is a terminal",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result here")
    parser.add_argument(
        "--trace", type=Path, metavar="FILE", help="write what rank 0 does in its 21st to 23rd step here"
    )
    compressors.METHODS[chosen].add_arguments(parser)
    args = parser.parse_args(argv)
    for name in ("epochs", "batch_size", "backward_passes_per_step"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}")
    if not args.eval_every > 0:
        parser.error(f"--eval-every must be above 0, got {args.eval_every}")
    if args.trace and args.device != "cpu":
        parser.error("--trace needs --device cpu: on a GPU it would show when work is launched, not when it is done")
    return args


def learning_rate(step: int, peak: float, warmup_steps: float, total_steps: int) -> float:
    """Linear to `peak` over the warm-up, then half a cosine that reaches 0 after the last step."""
    if step < warmup_steps:
        return peak * (step + 1) / (math.floor(warmup_steps) + 1)
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warmup_steps) / max(total_steps - warmup_steps, 1)))


class Run:
    """One training run: the model, the optimizer behind Horovod, and what is measured on the way."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.device = torch.device(f"cuda:{hvd.local_rank()}" if args.device == "cuda" else "cpu")
        # ResNet-50 belongs to ImageNet's shapes; the other sets have theirs.
        large = args.model == "resnet50"
        data = datasets.load(args.data, args.data_dir, size=224 if large else 32, classes=1000 if large else 10)
        self.data = (data.limited(args.limit_train) if args.limit_train else data).to(self.device)

        batches = datasets.steps_per_epoch(len(self.data.train_labels), args.batch_size, hvd.size())
        self.steps_per_epoch: int = batches // args.backward_passes_per_step
        if self.steps_per_epoch == 0:
            raise ValueError(f"an epoch has {batches} batches, fewer than --backward-passes-per-step")
        self.total_steps: int = min(self.steps_per_epoch * args.epochs, args.max_steps or sys.maxsize)
        self.epochs = math.ceil(self.total_steps / self.steps_per_epoch)

        torch.manual_seed(args.seed)
        self.model = models.build(args.model, self.data.channels, self.data.size, self.data.classes).to(self.device)
        hvd.broadcast_parameters(self.model.state_dict(), root_rank=0)
        if args.channels_last:  # only after the broadcast: Horovod takes contiguous tensors
            self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        # The rate is 0 until the first step sets it: broadcast_optimizer_state() takes a step of its own.
        optimizer = torch.optim.SGD(
            self.model.parameters(), lr=0.0, momentum=args.momentum, weight_decay=args.weight_decay
        )
        setting = compressors.Setting(self.model, optimizer, self.steps_per_epoch, hvd.size())
        self.compression = self.build_compression(setting)
        self.trace = Trace(range(20, 23) if args.trace else range(0))
        if args.trace:
            self.trace.watch(self.compression)
        self.optimizer = hvd.DistributedOptimizer(
            optimizer,
            named_parameters=self.model.named_parameters(),
            compression=self.compression,
            backward_passes_per_step=args.backward_passes_per_step,
        )
        hvd.broadcast_optimizer_state(self.optimizer, root_rank=0)
        self.optimizer.zero_grad()
        self.ahead = EXTRAPOLATIONS[args.extrapolate](self.model.parameters()) if args.extrapolate else None

        self.step = 0
        self.accuracy = float("nan")  # at the latest test
        self.step_seconds: list[float] = []
        self.data_seconds: list[float] = []
        self.test_seconds = 0.0

    def build_compression(self, setting: compressors.Setting) -> compressors.Compression:
        return compressors.METHODS[self.args.compression].build(self.args, setting)

    def tests(self) -> set[int]:
        """The steps after which the model is tested."""
        between = max(self.args.eval_every * self.steps_per_epoch, 1)
        return {round(i * between) for i in range(1, int(self.total_steps / between) + 1)} | {self.total_steps}

    def train_until(self, end: int, batches: Iterator[Batch], bar: tqdm) -> float:
        """The steps to ``end``, all of one epoch; the sum of this rank's losses."""
        args = self.args
        loss_sum = torch.zeros((), device=self.device)
        steps = end - self.step
        for done in range(1, steps + 1):
            start = time.perf_counter()
            inputs = [next(batches) for _ in range(args.backward_passes_per_step)]
            loaded = time.perf_counter()
            loss_sum += self.train_step(inputs)
            if self.device.type == "cuda":
                torch.cuda.synchronize()  # or the clock would time the launches
            self.data_seconds.append(loaded - start)
            self.step_seconds.append(time.perf_counter() - loaded)
            bar.update()
            if not bar.disable and done % 20 == 0:
                ratio = self.compression.stats()["last"]["wire_ratio"]
                accuracy = f"{self.accuracy:.4f}"
                bar.set_postfix(
                    loss=f"{loss_sum.item() / done:.3f}", accuracy=accuracy, ratio=f"{ratio:.1f}", refresh=False
                )
        return float(loss_sum.item())

    def train_step(self, inputs: list[Batch]) -> torch.Tensor:
        """Forward, backward, exchange, update; the mean loss, still on the device."""
        args = self.args
        rate = learning_rate(self.step, args.lr, args.lr_warmup_epochs * self.steps_per_epoch, self.total_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.trace.step(self.step)
        self.optimizer.zero_grad()
        total = torch.zeros((), device=self.device)
        for images, labels in inputs:
            if args.channels_last:
                images = images.contiguous(memory_format=torch.channels_last)
            with self.trace.span(Trace.MODEL, "forward"), metrics.autocast(args.amp, self.device):
                loss = F.cross_entropy(self.model(images), labels) / len(inputs)
            with self.trace.span(Trace.MODEL, "backward"):
                loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        with self.trace.span(Trace.MODEL, "synchronize and update"):
            self.optimizer.step()
        self.step += 1
        return total

    def train(self) -> dict[str, Any]:
        """All epochs; the content of the JSON file. Its history has an entry for every test and every end of an epoch,
        whose loss is the mean of the epoch so far; the clock of ``seconds`` stands still during tests."""
        args, history, tests = self.args, [], self.tests()
        begin = time.perf_counter()
        # tqdm takes None for: a bar where stderr is a terminal.
        hidden = True if hvd.rank() else None if args.progress is None else not args.progress
        bar = tqdm(total=self.total_steps, disable=hidden, unit="step")
        for end in sorted(tests | {min(i * self.steps_per_epoch, self.total_steps) for i in range(1, self.epochs + 1)}):
            if self.step % self.steps_per_epoch == 0:
                epoch, begun, losses = self.step // self.steps_per_epoch + 1, self.step, 0.0
                batches = datasets.train_batches(
                    self.data, args.batch_size, hvd.rank(), hvd.size(), args.seed, epoch, not args.no_augment
                )
            losses += self.train_until(end, batches, bar)
            loss = losses / (end - begun)
            # No jump at the very end: nothing could settle after it, batch norm's statistics for one.
            if self.ahead is not None and end % self.steps_per_epoch == 0 and end < self.total_steps:
                self.ahead.epoch_end()
            seconds = time.perf_counter() - begin - self.test_seconds
            accuracy = self.test() if end in tests else None
            total = self.compression.stats()["total"]
            means = metrics.mean_over_ranks({"loss": loss, "wire_bytes": total["wire_bytes"]})
            history.append(
                {
                    "epoch": epoch,
                    "step": end,
                    "train_loss": means["loss"],
                    "test_accuracy": accuracy,
                    "wire_bytes": means["wire_bytes"],
                    "seconds": seconds,
                }
            )
            if hvd.rank() == 0:
                tqdm.write(_line(history[-1], self.epochs, total["wire_ratio"]))
                sys.stdout.flush()
            if not math.isfinite(means["loss"]):  # the same mean on every rank, so all of them leave
                print(f"rank {hvd.rank()}: the loss is {means['loss']} after step {end}; stopping", file=sys.stderr)
                break
        bar.close()
        return self.result(history)

    def test(self) -> float:
        begin = time.perf_counter()
        self.accuracy = metrics.test_accuracy(self.model, self.data, self.args.amp)
        self.test_seconds += time.perf_counter() - begin
        return self.accuracy

    def result(self, history: list[dict[str, Any]]) -> dict[str, Any]:
        stats = self.compression.stats()
        steps = max(stats["steps"], 1)  # 0 with a single rank: Horovod then calls no compressor
        means = metrics.mean_over_ranks(
            {
                "wire_bytes_per_step": stats["total"]["wire_bytes"] / steps,
                "dense_bytes_per_step": stats["total"]["dense_bytes"] / steps,
                "wire_ratio": stats["total"]["wire_ratio"],
                "wire_ratio_last": stats["last"]["wire_ratio"],
                "residual_norm": stats["residual_norm"],
                "step_ms_median": 1000 * statistics.median(self.step_seconds),
                "compress_ms_median": stats["compress_ms"],
                "data_ms_median": 1000 * statistics.median(self.data_seconds),
            }
        )
        arguments = {name: str(value) if isinstance(value, Path) else value for name, value in vars(self.args).items()}
        return {
            "test_accuracy": history[-1]["test_accuracy"],
            "train_loss": history[-1]["train_loss"],
            "epochs": history[-1]["epoch"],
            "steps": self.step,
            "ranks": hvd.size(),
            "parameters": sum(parameter.numel() for parameter in self.model.parameters()),
            "seconds": history[-1]["seconds"],
            **means,
            "replicas_equal": metrics.replicas_equal(self.model),
            "history": history,
            "config": {**arguments, **metrics.environment()},
        }


def _line(entry: dict[str, Any], epochs: int, ratio: float) -> str:
    accuracy = "-" if entry["test_accuracy"] is None else f"{entry['test_accuracy']:.4f}"
    return (
        f"epoch {entry['epoch']:3d}/{epochs}, step {entry['step']:,}  loss {entry['train_loss']:.4f}  "
        f"test accuracy {accuracy}  wire {entry['wire_bytes'] / 1e6:.3f} MB ({ratio:.1f}x less than dense)  "
        f"{entry['seconds']:.1f} s"
    )


def main(args: argparse.Namespace, kind: type[Run] = Run) -> int:
    # Ranks share the machine's cores: more threads each would only take turns.
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    hvd.init()
    if args.device == "cuda":
        torch.cuda.set_device(hvd.local_rank())
    try:
        run = kind(args)
    except (ValueError, FileNotFoundError) as error:  # an argument that does not fit; the traceback says no more
        print(f"{Path(sys.argv[0]).name}: rank {hvd.rank()}: {error}", file=sys.stderr)
        return 2
    if hvd.rank() == 0:
        print(
            f"{args.model} on {args.data}: {hvd.size()} ranks, {run.total_steps} steps, {args.compression}", flush=True
        )
    result = run.train()
    if hvd.rank() == 0:
        print(", ".join(f"{key} {value:.6g}" for key, value in result.items() if isinstance(value, int | float)))
        if args.json:
            args.json.parent.mkdir(parents=True, exist_ok=True)
            args.json.write_text(json.dumps(result, indent=1) + "\n")
        if args.trace:
            run.trace.write(args.trace)
    hvd.shutdown()
    # A diverged run or unequal replicas is a result to keep, and a failure to report.
    return 0 if result["replicas_equal"] and math.isfinite(result["train_loss"]) else 1


if __name__ == "__main__":
    sys.exit(main(parse(sys.argv[1:])))
