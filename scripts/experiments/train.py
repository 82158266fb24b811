#!/usr/bin/env python3
"""Train a network with a compression method and write cost and quality as JSON: on Horovod, on torch DDP, on FSDP2
inside nodes, or with all ranks in one process, in turn, which needs none of them.

    bash scripts/run.sh 4 scripts/experiments/train.py --data digits --model cnn --compression iwp --density 1/64
    bash scripts/run.sh --ddp 4 scripts/experiments/train.py --host ddp --compression iwp
    bash scripts/run.sh --ddp 4 scripts/experiments/train.py --host fsdp --nodes 2 --compression iwp
    .venv/bin/python scripts/experiments/train.py --host threads --ranks 8 --data text --model gpt --optimizer adamw
    bash scripts/run.sh 4 scripts/experiments/train.py --compression iwp --local-steps 16 --optimizer adamw

Data is images, tested by accuracy, or text: the source files of Python's standard library as bytes, a tenth of the
files held out, tested by bits per byte. Or shakespeare: the file that nanoGPT trains on, in --data-dir. Or text-tags:
whether a byte is a part of a keyword, a name, a comment and so on, tested by accuracy. An epoch of text is 100 steps.
The learning rate rises and falls within the steps that are run, as --epochs and --max-steps say.

Fine-tuning begins with the weights of another task:

    train.py --host threads --ranks 1 --data text --model gpt --optimizer adamw --batch-size 32 --save results/gpt.pt
    train.py --host threads --data text-tags --model gpt-tagger --from results/gpt.pt --optimizer adamw --lr 3e-4

Bytes and their ratio are those of the training's exchanges. With --local-steps, a step's bytes are the mean over a
period, and its time, too; the average of all weights at the end is not among them (`dense_bytes_per_step`, once).
With --host fsdp, they are those of a rank's shards between nodes: compare node_bytes_per_step with other hosts.

`train.py --compression METHOD --help` also shows the options of that method.
"""

import argparse
import math
import os
import statistics
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from experiment import compressors, hosts, local_training, metrics, models, optimizers, quality
from experiment import data as datasets
from experiment.files import plain, script_parser
from experiment.images import CIFAR_FOLDER
from experiment.local_training import LocalTraining
from experiment.result_file import run_path, write_run
from experiment.text import SHAKESPEARE


def parse(argv: list[str], more: argparse.ArgumentParser | None = None) -> argparse.Namespace:
    """The options of a run, and those of ``more``, the parser of a script that builds on this one."""
    # The method comes first: it decides which further options there are.
    method = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    method.add_argument("--compression", choices=compressors.METHODS, default="none")
    chosen = compressors.METHODS[method.parse_known_args(argv)[0].compression]

    parser = script_parser(more.description if more else __doc__, parents=[method, more] if more else [method])
    parser.add_argument("--host", choices=hosts.HOSTS, default="horovod")
    parser.add_argument("--ranks", type=int, help="of --host threads; other hosts' launchers know them (default: 4)")
    parser.add_argument("--nodes", type=int, help="of equally many ranks each: compressors work between them")
    parser.add_argument("--data", choices=datasets.DATASETS, default="digits")
    parser.add_argument("--data-dir", type=Path, help=f"folder that holds {CIFAR_FOLDER}/ or {SHAKESPEARE}")
    parser.add_argument("--context", type=int, default=64, help="bytes of text that a model reads")
    parser.add_argument("--model", choices=models.MODELS, default="cnn")
    parser.add_argument("--from", dest="pretrained", type=Path, metavar="FILE", help="weights that --save has written")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the weights here at the end")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=32, help="images, or windows of text, per rank")
    optimizers.add_arguments(parser)
    local_training.add_arguments(parser)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--amp", choices=("off", "bf16"), default="off")
    parser.add_argument("--channels-last", action="store_true")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--limit-train", type=int, metavar="N", help="train on N images only, or N bytes")
    parser.add_argument("--max-steps", type=int, metavar="N", help="stop after N steps")
    parser.add_argument("--eval-every", type=float, default=1, metavar="EPOCHS", help="between tests, e.g. 0.25")
    parser.add_argument("--json", type=run_path, metavar="FILE.jsonl/NAME", help="write the result here")
    chosen.add_arguments(parser)
    parser.set_defaults(optimizer=chosen.optimizer)
    args = parser.parse_args(argv)
    if args.host == "threads" and args.ranks is None:
        args.ranks = 4
    try:
        optimizers.complete(args)
        local_training.complete(args)
        check(args)
    except ValueError as error:
        parser.error(str(error))
    return args


def check(args: argparse.Namespace) -> None:
    """``ValueError`` for options that do not fit."""
    for name in ("epochs", "batch_size", "ranks", "nodes", "context", "local_steps"):
        if (value := getattr(args, name)) is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
    if not args.eval_every > 0:
        raise ValueError(f"--eval-every must be above 0, got {args.eval_every}")
    if args.host not in (fitting := compressors.METHODS[args.compression].hosts):
        raise ValueError(f"--compression {args.compression} needs --host {fitting[0]}")
    if args.ranks is not None and args.host != "threads":
        raise ValueError("--ranks is for --host threads: a launcher starts the ranks of the other hosts")
    if args.optimizer == "muon-adamw" and args.host == "horovod" and not args.local_steps:
        raise ValueError("--optimizer muon-adamw is two optimizers, and Horovod's takes one: it needs another --host")
    if args.host == "fsdp":
        check_fsdp(args)
    elif args.nodes and not compressors.METHODS[args.compression].kind:
        raise ValueError(f"--compression {args.compression} knows no --nodes")
    elif args.nodes and args.local_steps:
        raise ValueError("--local-steps without --nodes: a node that averages each step is a rank with its batches")
    if args.nodes and args.ranks and args.ranks % args.nodes:
        raise ValueError(f"--nodes must be a divisor of --ranks {args.ranks}, got {args.nodes}")
    if args.device != "cpu" and args.host == "threads":
        raise ValueError("--host threads needs --device cpu")
    if (given := datasets.DATASETS[args.data]) != (reads := models.MODELS[args.model].reads):
        raise ValueError(f"--model {args.model} reads {reads}, and --data {args.data} is {given}")
    if args.channels_last and given != "images":
        raise ValueError("--channels-last is for images")


def check_fsdp(args: argparse.Namespace) -> None:
    """``ValueError`` for options that do not fit ``--host fsdp``."""
    if not args.nodes:
        raise ValueError("--host fsdp needs --nodes, inside which it shards the model")
    if args.optimizer.startswith("muon"):
        raise ValueError(f"--host fsdp trains without --optimizer {args.optimizer}, which works on whole matrices here")
    for name in ("channels_last", "save"):
        if getattr(args, name):
            raise ValueError(f"--host fsdp has no --{name.replace('_', '-')}")


class Run:
    """One training run: the model, the optimizer on its host, and the measurements."""

    def __init__(self, args: argparse.Namespace, host: hosts.Host) -> None:
        self.args, self.host = args, host
        self.period: int = args.local_steps or 1
        #: What couples the ranks' optimizers.
        self.coupling: Any = LocalTraining(args, host) if args.local_steps else host
        self.device = torch.device(f"cuda:{host.local_rank}" if args.device == "cuda" else "cpu")
        data = datasets.load(args.data, args.data_dir, args.context)
        self.data = (data.limited(args.limit_train) if args.limit_train else data).to(self.device)

        self.steps_per_epoch = self.data.steps_per_epoch(args.batch_size, host.size)
        self.total_steps: int = min(self.steps_per_epoch * args.epochs, args.max_steps or sys.maxsize)

        torch.manual_seed(args.seed)
        self.model = models.build(args.model, *self.data.shape).to(self.device)
        if args.pretrained:
            models.load_pretrained(self.model, args.pretrained)
        if args.channels_last:
            self.model.to(memory_format=torch.channels_last)
        host.shard(args, self.model)
        optimizer = optimizers.build(args, self.model)
        self.compression = self.build_compression(optimizer)
        self.module, self.optimizer = self.coupling.wrap(self.model, optimizer, self.compression)

        self.step = 0
        self.step_seconds: list[float] = []
        self.data_seconds: list[float] = []

    def build_compression(self, optimizer: torch.optim.Optimizer) -> Any:
        return self.coupling.compression(self.args, self.args.compression, self.model, optimizer)

    def train_step(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Forward, backward, exchange, update; the loss, still on the device."""
        args, warmup = self.args, self.args.lr_warmup_epochs * self.steps_per_epoch
        rate = optimizers.learning_rate(self.step, args.lr, warmup, self.total_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad()
        if args.channels_last:
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        with quality.autocast(args.amp, self.device):
            loss = F.cross_entropy(self.module(inputs).flatten(0, -2), targets.flatten())
        loss.backward()
        self.coupling.synchronize(self.optimizer)
        self.coupling.update(self.optimizer)
        self.step += 1
        return loss.detach()

    def train(self) -> dict[str, Any]:
        """All epochs; the content of the JSON file. The history has an entry for every test and every end of an epoch;
        its loss is the mean of the epoch so far, and ``seconds`` excludes the tests."""
        args, host, metric, history, testing = self.args, self.host, self.data.metric, [], 0.0
        total, per_epoch = self.total_steps, self.steps_per_epoch
        between = max(args.eval_every * per_epoch, 1)
        tests = {round(i * between) for i in range(1, int(total / between) + 1)} | {total}
        begin = time.perf_counter()
        for end in sorted(tests | set(range(per_epoch, total, per_epoch))):
            if self.step % per_epoch == 0:
                epoch, begun, losses = self.step // per_epoch + 1, self.step, torch.zeros((), device=self.device)
                batches = self.data.train_batches(args.batch_size, host.rank, host.size, args.seed, epoch)
            while self.step < end:
                start = time.perf_counter()
                batch = next(batches)
                self.data_seconds.append(time.perf_counter() - start)
                losses += self.train_step(*batch)
                if self.device.type == "cuda":
                    torch.cuda.synchronize()  # otherwise only the launches are timed
                self.step_seconds.append(time.perf_counter() - start - self.data_seconds[-1])
            seconds = time.perf_counter() - begin - testing
            tested = self.test() if end in tests else None
            testing = time.perf_counter() - begin - seconds
            sent = self.compression.stats()["total"]["wire_bytes"]
            means = metrics.mean_over_ranks({"train_loss": float(losses) / (end - begun), "wire_bytes": sent}, host)
            history.append({"epoch": epoch, "step": end, metric.key: tested, "seconds": seconds, **means})
            if host.rank == 0:
                shown = "-" if tested is None else f"{tested:.4f}"
                print(
                    f"epoch {epoch:3d}/{math.ceil(total / per_epoch)}, step {end:,}  loss {means['train_loss']:.4f}  "
                    f"{metric.label} {shown}  sent {sent / 1e6:.3f} MB  {seconds:.1f} s",
                    flush=True,
                )
            if not math.isfinite(means["train_loss"]):  # the same mean on every rank, so all of them leave
                print(f"rank {host.rank}: the loss is not finite after step {end}; stopping", file=sys.stderr)
                break
        return self.result(history)

    def test(self) -> float:
        averaged = quality.averaged_weights(self.model, self.host) if self.args.local_steps else nullcontext()
        with self.host.whole(self.model), averaged:
            return quality.test(self.model, self.data, self.args.amp, self.host)

    def result(self, history: list[dict[str, Any]]) -> dict[str, Any]:
        stats = self.compression.stats()
        # The compressor counts exchanges: none with a single rank, for which Horovod does not call it.
        steps = self.period // (self.args.fragments or 1) * max(stats["steps"], 1)
        count, taken = self.period, self.step_seconds
        seconds = [statistics.fmean(taken[begin : begin + count]) for begin in range(0, len(taken), count)]
        means = metrics.mean_over_ranks(
            {
                "wire_bytes_per_step": stats["total"]["wire_bytes"] / steps,
                "dense_bytes_per_step": stats["total"]["dense_bytes"] / steps,
                "wire_ratio": stats["total"]["wire_ratio"],
                "wire_ratio_last": stats["last"]["wire_ratio"],
                "residual_norm": stats["residual_norm"],
                "step_ms_median": 1000 * statistics.median(seconds),
                "compress_ms_median": stats["compress_ms"],
                "data_ms_median": 1000 * statistics.median(self.data_seconds),
            },
            self.host,
        )
        return {
            self.data.metric.key: history[-1][self.data.metric.key],
            "train_loss": history[-1]["train_loss"],
            "epochs": history[-1]["epoch"],
            "steps": self.step,
            "ranks": self.host.size,
            # What a node's card sends.
            "node_bytes_per_step": means["wire_bytes_per_step"] * self.host.size / (self.args.nodes or self.host.size),
            "parameters": sum(parameter.numel() for parameter in self.model.parameters()),
            "seconds": history[-1]["seconds"],
            **means,
            "replicas_equal": metrics.replicas_equal(self.coupling.replicas(self.model), self.host),
            "history": history,
            "config": {**plain(vars(self.args)), **metrics.environment()},
        }


def main(args: argparse.Namespace, kind: type[Run] = Run) -> int:
    # Ranks share the machine's cores.
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    return hosts.run(args.host, lambda host: train(args, host, kind), args.device, args.ranks or 1, args.nodes or 0)


def train(args: argparse.Namespace, host: hosts.Host, kind: type[Run]) -> int:
    """The whole work of a rank; its exit status."""
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
        write_run(args.json, result)
        if args.save:
            args.save.parent.mkdir(parents=True, exist_ok=True)
            torch.save(run.model.state_dict(), args.save)
    # A diverged run or unequal replicas is a result to keep, and a failure to report.
    return host.close(0 if result["replicas_equal"] and math.isfinite(result["train_loss"]) else 1)


if __name__ == "__main__":
    sys.exit(main(parse(sys.argv[1:])))
