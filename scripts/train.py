#!/usr/bin/env python3
"""Train a network with a compression method, on Horovod or on torch DDP, and write cost and accuracy as JSON.

    bash scripts/run.sh 4 scripts/train.py --data digits --model cnn --compression iwp --density 1/64
    bash scripts/run.sh --ddp 4 scripts/train.py --host ddp --compression iwp

`train.py --compression METHOD --help` also shows the options of that method.
"""

import argparse
import math
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from experiment import compressors, hosts, metrics, models
from experiment import data as datasets
from experiment.files import plain, script_parser, write_json
from experiment.trace import Trace

from hvd_compress.methods import extrapolation

EXTRAPOLATIONS = {"wnn": extrapolation.WNN, "line": extrapolation.Line}


def parse(argv: list[str], more: argparse.ArgumentParser | None = None) -> argparse.Namespace:
    """The options of a run, and those of ``more``, the parser of a script that builds on this one."""
    # The method comes first: it decides which further options there are.
    method = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    method.add_argument("--compression", choices=compressors.METHODS, default="none")
    chosen = compressors.METHODS[method.parse_known_args(argv)[0].compression]

    parser = script_parser(more.description if more else __doc__, parents=[method, more] if more else [method])
    parser.add_argument("--host", choices=hosts.HOSTS, default="horovod")
    parser.add_argument("--data", choices=datasets.DATASETS, default="digits")
    parser.add_argument("--data-dir", type=Path, help=f"folder that holds {datasets.CIFAR_FOLDER}/")
    parser.add_argument("--model", choices=models.MODELS, default="cnn")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=32, help="images per rank")
    parser.add_argument("--lr", type=float, default=0.1, help="peak learning rate, for the global batch")
    parser.add_argument("--lr-warmup-epochs", type=float, default=1, help="epochs of linear rise; then a cosine to 0")
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--weight-decay", type=float, default=5e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--extrapolate",
        choices=sorted(EXTRAPOLATIONS),
        help="extrapolate the weights by five epochs, every five epochs",
    )
    parser.add_argument("--amp", choices=("off", "bf16"), default="off")
    parser.add_argument("--channels-last", action="store_true")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--limit-train", type=int, metavar="N", help="train on N images only")
    parser.add_argument("--max-steps", type=int, metavar="N", help="stop after N steps")
    parser.add_argument("--eval-every", type=float, default=1, metavar="EPOCHS", help="between tests, e.g. 0.25")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result here")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="write a trace of rank 0's steps 21 to 23 here")
    chosen.add_arguments(parser)
    args = parser.parse_args(argv)
    for name in ("epochs", "batch_size"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}")
    if not args.eval_every > 0:
        parser.error(f"--eval-every must be above 0, got {args.eval_every}")
    if args.host not in chosen.hosts:
        parser.error(f"--compression {args.compression} needs --host {chosen.hosts[0]}")
    if args.trace and (args.device != "cpu" or args.host != "horovod"):
        parser.error("--trace needs --host horovod --device cpu")
    return args


def learning_rate(step: int, peak: float, warmup_steps: float, total_steps: int) -> float:
    """Linear to ``peak`` over the warm-up, then half a cosine that reaches 0 after the last step."""
    if step < warmup_steps:
        return peak * (step + 1) / (math.floor(warmup_steps) + 1)
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warmup_steps) / max(total_steps - warmup_steps, 1)))


class Run:
    """One training run: the model, the optimizer on its host, and the measurements."""

    def __init__(self, args: argparse.Namespace, host: hosts.Horovod) -> None:
        self.args, self.host = args, host
        self.device = torch.device(f"cuda:{host.local_rank}" if args.device == "cuda" else "cpu")
        data = datasets.load(args.data, args.data_dir)
        self.data = (data.limited(args.limit_train) if args.limit_train else data).to(self.device)

        self.steps_per_epoch = datasets.steps_per_epoch(len(self.data.train_labels), args.batch_size, host.size)
        self.total_steps: int = min(self.steps_per_epoch * args.epochs, args.max_steps or sys.maxsize)

        torch.manual_seed(args.seed)
        self.model = models.build(args.model, self.data.channels, self.data.size, self.data.classes).to(self.device)
        host.broadcast(self.model)
        if args.channels_last:  # after the broadcast: Horovod requires contiguous tensors
            self.model.to(memory_format=torch.channels_last)
        optimizer = torch.optim.SGD(
            self.model.parameters(), lr=args.lr, momentum=args.momentum, weight_decay=args.weight_decay
        )
        self.compression = self.build_compression(optimizer)
        self.trace = Trace(range(20, 23) if args.trace else range(0))
        if args.trace:
            self.trace.watch(self.compression)
        self.module, self.optimizer = host.wrap(self.model, optimizer, self.compression)
        self.extrapolation = EXTRAPOLATIONS[args.extrapolate](self.model.parameters()) if args.extrapolate else None

        self.step = 0
        self.step_seconds: list[float] = []
        self.data_seconds: list[float] = []

    def build_compression(self, optimizer: torch.optim.Optimizer) -> Any:
        return self.host.compression(self.args, self.args.compression, self.model, optimizer)

    def train_step(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Forward, backward, exchange, update; the loss, still on the device."""
        args = self.args
        rate = learning_rate(self.step, args.lr, args.lr_warmup_epochs * self.steps_per_epoch, self.total_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.trace.step(self.step)
        self.optimizer.zero_grad()
        if args.channels_last:
            images = images.contiguous(memory_format=torch.channels_last)
        with self.trace.span(Trace.MODEL, "forward"), metrics.autocast(args.amp, self.device):
            loss = F.cross_entropy(self.module(images), labels)
        with self.trace.span(Trace.MODEL, "backward"):
            loss.backward()
        with self.trace.span(Trace.MODEL, "synchronize and update"):
            self.optimizer.step()
        self.step += 1
        return loss.detach()

    def train(self) -> dict[str, Any]:
        """All epochs; the content of the JSON file. The history has an entry for every test and every end of an epoch;
        its loss is the mean of the epoch so far, and ``seconds`` excludes the tests."""
        args, host, history, testing = self.args, self.host, [], 0.0
        total, per_epoch = self.total_steps, self.steps_per_epoch
        between = max(args.eval_every * per_epoch, 1)
        tests = {round(i * between) for i in range(1, int(total / between) + 1)} | {total}
        begin = time.perf_counter()
        for end in sorted(tests | set(range(per_epoch, total, per_epoch))):
            if self.step % per_epoch == 0:
                epoch, begun, losses = self.step // per_epoch + 1, self.step, torch.zeros((), device=self.device)
                batches = datasets.train_batches(self.data, args.batch_size, host.rank, host.size, args.seed, epoch)
            while self.step < end:
                start = time.perf_counter()
                images, labels = next(batches)
                self.data_seconds.append(time.perf_counter() - start)
                losses += self.train_step(images, labels)
                if self.device.type == "cuda":
                    torch.cuda.synchronize()  # otherwise only the launches are timed
                self.step_seconds.append(time.perf_counter() - start - self.data_seconds[-1])
            # Not after the last step: nothing, e.g. the norm statistics, could follow the jump.
            if self.extrapolation is not None and end % per_epoch == 0 and end < total:
                self.extrapolation.epoch_end()
            seconds = time.perf_counter() - begin - testing
            accuracy = metrics.test_accuracy(self.model, self.data, args.amp, host) if end in tests else None
            testing = time.perf_counter() - begin - seconds
            sent = self.compression.stats()["total"]["wire_bytes"]
            means = metrics.mean_over_ranks({"train_loss": float(losses) / (end - begun), "wire_bytes": sent}, host)
            history.append({"epoch": epoch, "step": end, "test_accuracy": accuracy, "seconds": seconds, **means})
            if host.rank == 0:
                tested = "-" if accuracy is None else f"{accuracy:.4f}"
                print(
                    f"epoch {epoch:3d}/{math.ceil(total / per_epoch)}, step {end:,}  loss {means['train_loss']:.4f}  "
                    f"test accuracy {tested}  sent {sent / 1e6:.3f} MB  {seconds:.1f} s",
                    flush=True,
                )
            if not math.isfinite(means["train_loss"]):  # the same mean on every rank, so all of them leave
                print(f"rank {host.rank}: the loss is not finite after step {end}; stopping", file=sys.stderr)
                break
        return self.result(history)

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
            },
            self.host,
        )
        return {
            "test_accuracy": history[-1]["test_accuracy"],
            "train_loss": history[-1]["train_loss"],
            "epochs": history[-1]["epoch"],
            "steps": self.step,
            "ranks": self.host.size,
            "parameters": sum(parameter.numel() for parameter in self.model.parameters()),
            "seconds": history[-1]["seconds"],
            **means,
            "replicas_equal": metrics.replicas_equal(self.model, self.host),
            "history": history,
            "config": {**plain(vars(self.args)), **metrics.environment()},
        }


def main(args: argparse.Namespace, kind: type[Run] = Run) -> int:
    # Ranks share the machine's cores.
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    host = hosts.start(args.host, args.device)
    if args.device == "cuda":
        torch.cuda.set_device(host.local_rank)
    try:
        run = kind(args, host)
    except (ValueError, FileNotFoundError) as error:  # an argument that does not fit
        print(f"{Path(sys.argv[0]).name}: rank {host.rank}: {error}", file=sys.stderr)
        return 2
    if host.rank == 0:
        print(f"{args.model} on {args.data}: {host.size} ranks, {run.total_steps} steps", flush=True)
    result = run.train()
    if host.rank == 0:
        print(", ".join(f"{key} {value:.6g}" for key, value in result.items() if isinstance(value, int | float)))
        write_json(args.json, result)
        if args.trace:
            run.trace.write(args.trace)
    # A diverged run or unequal replicas is a result to keep, and a failure to report.
    return host.close(0 if result["replicas_equal"] and math.isfinite(result["train_loss"]) else 1)


if __name__ == "__main__":
    sys.exit(main(parse(sys.argv[1:])))
