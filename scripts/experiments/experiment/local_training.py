"""Local steps of each rank between exchanges of weights, in place of a host's averages of gradients."""

import argparse
from typing import Any

from torch import nn
from torch.optim import Optimizer

from experiment import compressors
from experiment.hosts import Host
from hvd_compress import LocalSteps, NoCompression
from hvd_compress.cli.ranks import LocalRank

#: The options that go with --local-steps, and their defaults.
OPTIONS: dict[str, Any] = {
    "unsent": "weights",
    "buffer_decay": 1.0,
    "outer_lr": 1.0,
    "outer_momentum": 0.0,
    "restore_length": False,
    "fragments": 1,
    "delay": 0,
    "averaged_gradients": False,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "local steps",
        "Instead of gradients, the compressor exchanges how far the weights have come (docs/local_steps.md). With "
        "--compression none or fp16 these differences are averaged completely, as in local SGD and DiLoCo. Tests use "
        "the average of the ranks' weights.",
    )
    group.add_argument("--local-steps", type=int, metavar="PERIOD", help="optimizer steps between two exchanges")
    group.add_argument("--unsent", choices=("weights", "buffer"), help="where stays what was not sent")
    group.add_argument("--buffer-decay", type=float, help="of the buffer, after each exchange; SparseLoCo: 0.95")
    group.add_argument("--outer-lr", type=float, help="of the averaged differences; DiLoCo: 0.7")
    group.add_argument("--outer-momentum", type=float, help="Nesterov's, of the common weights; DiLoCo: 0.9")
    group.add_argument(
        "--restore-length",
        action="store_true",
        default=None,
        help="scale the averaged differences to the length of the ranks' own",
    )
    group.add_argument(
        "--fragments", type=int, help="parts of the weights, one exchanged every PERIOD / FRAGMENTS steps"
    )
    group.add_argument(
        "--averaged-gradients",
        action="store_true",
        default=None,
        help="with muon or muon-adamw: all but the hidden matrices move by averaged gradients, once a period",
    )
    group.add_argument("--delay", type=int, metavar="STEPS", help="from the begin of an exchange to its end")


def complete(args: argparse.Namespace) -> None:
    """With --local-steps, sets what was not given to the defaults. ``ValueError`` for options that do not fit."""
    if args.local_steps is None:
        if given := [name for name in OPTIONS if getattr(args, name) is not None]:
            raise ValueError(f"--{given[0].replace('_', '-')} needs --local-steps")
        return
    for name, default in OPTIONS.items():
        if getattr(args, name) is None:
            setattr(args, name, default)
    if args.averaged_gradients and args.optimizer not in ("muon", "muon-adamw"):
        raise ValueError("--averaged-gradients needs --optimizer muon or muon-adamw")
    method = compressors.METHODS[args.compression]
    if not method.kind and args.compression not in compressors.STOCK:
        raise ValueError(f"--compression {args.compression} compresses gradients only: it has no --local-steps")
    if getattr(args, "momentum_correction", False):
        raise ValueError("momentum stays with the local optimizer: --local-steps needs --no-momentum-correction")


class LocalTraining(LocalRank):
    """Trains by :class:`hvd_compress.LocalSteps`: those calls of a host that couple the ranks' optimizers."""

    def __init__(self, args: argparse.Namespace, host: Host) -> None:
        self._host = host
        options = {"decay" if name == "buffer_decay" else name: getattr(args, name) for name in OPTIONS}
        averaged = options.pop("averaged_gradients")

        def build(model: nn.Module, optimizer: Any, compression: Any) -> LocalSteps:
            others = optimizer.optimizers[1:] if averaged else ()
            return LocalSteps(compression, optimizer, args.local_steps, on_averaged_gradients=others, **options)

        super().__init__(build)

    def compression(self, args: argparse.Namespace, method: str, model: nn.Module, optimizer: Optimizer) -> Any:
        if compressors.METHODS[method].kind:
            return self._host.compression(args, method, model, optimizer)
        values = "fp16" if method == "fp16" else "fp32"
        collectives = self._host.collectives
        return NoCompression(model.named_parameters(), values=values, collectives=collectives)
