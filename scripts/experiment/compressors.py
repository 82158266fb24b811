"""Every compression method of the experiments: its options, and how they become an object.

To add one: a function that adds its options, a function that builds it, an entry in METHODS with its paper.
Options belong to their method: `train.py --compression iwp --help` shows them, and an option of another
method is refused rather than ignored.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from hvd_compress.engine.collectives import ring_bytes


class Compression(Protocol):
    """What Horovod calls (`compress`, `decompress`), and the account that a run reports (`stats`)."""

    def compress(self, tensor: Tensor) -> tuple[Tensor, Any]: ...
    def decompress(self, tensor: Tensor, ctx: Any) -> Tensor: ...
    def stats(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Setting:
    """What a method may need to know of the run."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer  # the plain one, before Horovod wraps it
    steps_per_epoch: int
    ranks: int


@dataclass(frozen=True)
class Method:
    add_arguments: Callable[[argparse.ArgumentParser], None]
    build: Callable[[argparse.Namespace, Setting], Compression]
    summary: str  # what it sends, in one line
    paper: str  # where it was published: a comparison must be able to name it

    def defaults(self) -> dict[str, Any]:
        """The method's options and their defaults: what it can be asked for."""
        parser = argparse.ArgumentParser()
        self.add_arguments(parser)
        return vars(parser.parse_args([]))


class Counted:
    """A stock Horovod compressor with the clock and the byte count that hvd_compress' own methods keep.

    It also makes channels_last gradients contiguous, which Horovod demands, and gives their strides back.
    """

    def __init__(self, stock: Any, ranks: int):
        self.stock = stock
        self.ranks = ranks
        self.pending = 0  # gradients handed to Horovod that have not come back
        self.seconds = 0.0
        self.current = {"dense": 0, "wire": 0}
        self.last = {"dense": 0, "wire": 0}
        self.total = {"dense": 0, "wire": 0}
        self.step_seconds: list[float] = []

    def compress(self, tensor: Tensor) -> tuple[Tensor, Any]:
        start = time.perf_counter()
        payload, ctx = self.stock.compress(tensor.contiguous())
        self.current["dense"] += 4 * tensor.numel()
        self.current["wire"] += payload.nbytes
        self.pending += 1
        restore = None if tensor.is_contiguous() else tensor
        self.seconds += time.perf_counter() - start
        return payload, (ctx, restore)

    def decompress(self, tensor: Tensor, ctx: Any) -> Tensor:
        start = time.perf_counter()
        ctx, restore = ctx
        result: Tensor = self.stock.decompress(tensor, ctx)
        if restore is not None:
            result = restore.copy_(result)
        self.pending -= 1
        self.seconds += time.perf_counter() - start
        if self.pending == 0:  # Horovod submits every gradient before it takes the first one back
            self._end_step()
        return result

    def stats(self) -> dict[str, Any]:
        return {
            "steps": len(self.step_seconds),
            "last": self._account(self.last),
            "total": self._account(self.total),
            "residual_norm": 0.0,
            "compress_ms": 1000 * statistics.median(self.step_seconds or [0.0]),
        }

    def _end_step(self) -> None:
        for kind, count in self.current.items():
            self.total[kind] += count
        self.last, self.current = self.current, {"dense": 0, "wire": 0}
        self.step_seconds.append(self.seconds)
        self.seconds = 0.0

    def _account(self, count: dict[str, int]) -> dict[str, float]:
        dense, wire = (ring_bytes("allreduce", count[kind], self.ranks) for kind in ("dense", "wire"))
        return {
            "dense_bytes": dense,
            "wire_bytes": wire,
            "values_bytes": 0.0,
            "indices_bytes": 0.0,
            "dense_tensor_bytes": wire,
            "budget_bytes": 0.0,
            "wire_ratio": count["dense"] / count["wire"] if count["wire"] else 1.0,
        }


def _no_arguments(parser: argparse.ArgumentParser) -> None:
    pass


def _none(args: argparse.Namespace, setting: Setting) -> Compression:
    import horovod.torch as hvd

    return Counted(hvd.Compression.none, setting.ranks)


def _fp16(args: argparse.Namespace, setting: Setting) -> Compression:
    import horovod.torch as hvd

    return Counted(hvd.Compression.fp16, setting.ranks)


# The defaults of all options are the methods' own; written out, they are on record in the JSON file.


def _common_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of all methods of hvd_compress."""
    parser.add_argument("--dense-values", choices=("fp16", "fp32"), default="fp32", help="how small tensors travel")
    parser.add_argument(
        "--bucket-mb", type=float, default=32.0, metavar="MIB", help="of gradients that travel together"
    )
    parser.add_argument(
        "--momentum-correction", action="store_true", help="take the momentum over from the optimizer, as DGC does"
    )


def _share_arguments(parser: argparse.ArgumentParser, density: float, values: str) -> None:
    """The options of every method that sends a share of the entries."""
    _common_arguments(parser)
    parser.add_argument("--density", type=_fraction, default=density, help="share of entries sent, as 0.01 or 1/64")
    parser.add_argument("--values", default=values, help="how values travel: fp16, fp32, lanes4, lloyd4, range10, ...")


def _density_arguments(parser: argparse.ArgumentParser, density: float, values: str) -> None:
    """And where that share may fall to its value."""
    _share_arguments(parser, density, values)
    parser.add_argument("--warmup-epochs", type=float, default=0, help="epochs in which the density falls to --density")


def _sparse_arguments(parser: argparse.ArgumentParser, values: str, budget_interval: int, explore: float) -> None:
    """The options of every method that shares its budget and its choices among the ranks."""
    _density_arguments(parser, 1 / 32, values)
    parser.add_argument(
        "--explore", type=float, default=explore, metavar="RHO", help="share of the choice made at random"
    )
    parser.add_argument(
        "--budget-interval", type=int, default=budget_interval, metavar="STEPS", help="between budget updates"
    )


def _leader_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--leaders", type=_count_or_all, default=None, help="ranks that choose a block: N or all")


def _common(kind: Any, args: argparse.Namespace, setting: Setting, **options: Any) -> Compression:
    """Builds a method from the options that all of them have, and its own."""
    common = {"dense_values": args.dense_values, "bucket_mb": args.bucket_mb, "seed": args.seed}
    compression = kind(setting.model.named_parameters(), **common, **options)
    if args.momentum_correction:
        compression.take_momentum(setting.optimizer)
    built: Compression = compression
    return built


def _with_density(
    kind: Any, args: argparse.Namespace, setting: Setting, density: Any = None, **options: Any
) -> Compression:
    return _common(
        kind,
        args,
        setting,
        density=args.density if density is None else density,
        warmup_steps=round(args.warmup_epochs * setting.steps_per_epoch),
        values=args.values,
        **options,
    )


def _sparse(kind: Any, args: argparse.Namespace, setting: Setting, density: Any = None, **options: Any) -> Compression:
    shared = {"explore": args.explore, "budget_interval": args.budget_interval}
    return _with_density(kind, args, setting, density, **shared, **options)


def _iwp_arguments(parser: argparse.ArgumentParser) -> None:
    _sparse_arguments(parser, values="lanes4", budget_interval=100, explore=0.05)
    _leader_arguments(parser)
    parser.add_argument("--floor", type=float, default=0.5, help="constant under the weights, in units of mean |w|")
    parser.add_argument("--selection", choices=("block", "topk"), default="block")
    parser.add_argument("--no-block-means", action="store_true", help="all of a gradient waits for its entries' turns")


def _iwp(args: argparse.Namespace, setting: Setting) -> Compression:
    import hvd_compress

    return _sparse(
        hvd_compress.IWP,
        args,
        setting,
        leaders=args.leaders,
        floor=args.floor,
        selection=args.selection,
        block_means=not args.no_block_means,
    )


def _fft_arguments(parser: argparse.ArgumentParser) -> None:
    _sparse_arguments(parser, values="lanes4", budget_interval=100, explore=0.0)
    _leader_arguments(parser)
    parser.add_argument("--exchange", choices=("ring", "gather"), default="ring", help="gather: the paper's form")
    parser.add_argument(
        "--diminishing", action="store_true", help="the density rises as the learning rate falls, as in the paper"
    )


def _fft(args: argparse.Namespace, setting: Setting) -> Compression:
    import hvd_compress
    from hvd_compress.selection.schedule import Diminishing

    density = Diminishing(args.density, setting.optimizer) if args.diminishing else None
    return _sparse(hvd_compress.FFT, args, setting, density, leaders=args.leaders, exchange=args.exchange)


def _mipd_arguments(parser: argparse.ArgumentParser) -> None:
    _sparse_arguments(parser, values="lanes4", budget_interval=100, explore=0.05)
    parser.add_argument("--floor", type=float, default=0.5, help="constant under |w| and |e|, in units of their rms")
    parser.add_argument("--significance", choices=("taylor", "fisher"), default="taylor")
    parser.add_argument("--compensation", type=float, default=0.0, metavar="GAMMA", help="share of the guess applied")
    parser.add_argument("--smoothing", type=float, default=0.9, metavar="BETA", help="weight of the past in the guess")
    parser.add_argument("--whole-model", action="store_true", help="one scale for all layers: the rival")


def _mipd(args: argparse.Namespace, setting: Setting) -> Compression:
    import hvd_compress

    return _sparse(
        hvd_compress.MIPD,
        args,
        setting,
        floor=args.floor,
        significance=args.significance,
        compensation=args.compensation,
        smoothing=args.smoothing,
        layerwise=not args.whole_model,
    )


def _slimdp_arguments(parser: argparse.ArgumentParser) -> None:
    _density_arguments(parser, 1 / 32, "lanes4")
    parser.add_argument("--core", type=float, default=0.5, help="share of what is sent that stays the same for a while")
    parser.add_argument("--reselect", type=int, default=20, metavar="STEPS", help="between selections of the core")
    parser.add_argument("--gradient-weight", type=float, default=1.0, help="of the gradient in the significance")
    parser.add_argument("--budget-interval", type=int, default=0, metavar="STEPS", help="between budget updates")


def _slimdp(args: argparse.Namespace, setting: Setting) -> Compression:
    import hvd_compress

    return _with_density(
        hvd_compress.SlimDP,
        args,
        setting,
        core=args.core,
        reselect=args.reselect,
        gradient_weight=args.gradient_weight,
        budget_interval=args.budget_interval,
    )


def _mp2_arguments(parser: argparse.ArgumentParser) -> None:
    _share_arguments(parser, 1 / 9, "lanes4")
    parser.add_argument(
        "--choice", choices=["significance", "rotation"], default="significance", help="of what is sent"
    )
    parser.add_argument("--prediction", action="store_true", help="predict what is not sent")
    parser.add_argument("--gate", type=float, default=0.1, metavar="COSINE", help="the least that is predicted at")


def _mp2(args: argparse.Namespace, setting: Setting) -> Compression:
    import hvd_compress

    return _common(
        hvd_compress.MP2,
        args,
        setting,
        density=args.density,
        values=args.values,
        choice=args.choice,
        prediction=args.prediction,
        gate=args.gate,
    )


def _topk_arguments(parser: argparse.ArgumentParser) -> None:
    _density_arguments(parser, 1 / 256, "fp32-gather")


def _topk(args: argparse.Namespace, setting: Setting) -> Compression:
    import hvd_compress

    return _with_density(hvd_compress.TopK, args, setting)


def _dgc_arguments(parser: argparse.ArgumentParser) -> None:
    _density_arguments(parser, 1 / 1000, "fp32-gather")
    parser.add_argument("--sample", type=float, default=0.01, help="share of the entries that guesses the threshold")
    parser.add_argument("--clip-norm", type=float, help="largest norm of a parameter's gradient")
    # The momentum is the method's business, so it is taken over with or without --momentum-correction.
    parser.set_defaults(momentum_correction=True)


def _dgc(args: argparse.Namespace, setting: Setting) -> Compression:
    import hvd_compress

    return _with_density(hvd_compress.DGC, args, setting, momentum=0.0, sample=args.sample, clip_norm=args.clip_norm)


def _quantized_arguments(parser: argparse.ArgumentParser) -> None:
    _common_arguments(parser)
    parser.add_argument("--error-feedback", action="store_true", help="keep what the code lost for the next step")


def _qsgd_arguments(parser: argparse.ArgumentParser) -> None:
    _quantized_arguments(parser)
    parser.add_argument("--bits", type=int, default=4, help="of a value, sign included")
    parser.add_argument("--run", type=int, default=512, help="entries that share a norm")
    parser.add_argument("--norm", choices=("l2", "max"), default="l2")


def _qsgd(args: argparse.Namespace, setting: Setting) -> Compression:
    import hvd_compress

    own = {"bits": args.bits, "run": args.run, "norm": args.norm}
    return _common(hvd_compress.QSGD, args, setting, error_feedback=args.error_feedback, **own)


def _terngrad_arguments(parser: argparse.ArgumentParser) -> None:
    _quantized_arguments(parser)
    parser.add_argument("--clip", type=float, default=2.5, help="in standard deviations")


def _terngrad(args: argparse.Namespace, setting: Setting) -> Compression:
    import hvd_compress

    return _common(hvd_compress.TernGrad, args, setting, error_feedback=args.error_feedback, clip=args.clip)


def _fraction(text: str) -> float:
    numerator, _, denominator = text.partition("/")
    value = float(numerator) / float(denominator or 1)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"must be above 0 and at most 1, got {text}")
    return value


def _count_or_all(text: str) -> int | None:
    return None if text == "all" else int(text)


METHODS: dict[str, Method] = {
    "none": Method(
        _no_arguments,
        _none,
        "float32, summed by the ring",
        "Sergeev & Del Balso, Horovod, 2018; arXiv 1802.05799",
    ),
    "fp16": Method(
        _no_arguments,
        _fp16,
        "float16, summed by the ring",
        "Horovod's own Compression.fp16: Sergeev & Del Balso, 2018; arXiv 1802.05799",
    ),
    "iwp": Method(
        _iwp_arguments,
        _iwp,
        "the entries of largest gradient relative to weight, as random leaders choose them",
        "Cheng & Xu, Bandwidth Reduction using Importance Weighted Pruning on Ring AllReduce, 2019; arXiv 1901.01544",
    ),
    "fft": Method(
        _fft_arguments,
        _fft,
        "the largest Fourier coefficients",
        "Wang et al., FFT-based Gradient Sparsification for Distributed Training of DNNs, HPDC 2020; arXiv 1811.08596",
    ),
    "mipd": Method(
        _mipd_arguments,
        _mipd,
        "what weights and past gradients call significant: no indices",
        "Zhang & Wang, MIPD, IEEE TPDS 33(11), 2022",
    ),
    "slimdp": Method(
        _slimdp_arguments,
        _slimdp,
        "a core of significant entries, and a random few of the others: no indices",
        "Sun et al., Slim-DP, AAMAS 2018; arXiv 1709.09393",
    ),
    "mp2": Method(
        _mp2_arguments,
        _mp2,
        "what matters by what all ranks know, and a network may predict the rest: no indices",
        "Liu et al., MP2, Computer Networks 255, 2024",
    ),
    "topk": Method(
        _topk_arguments,
        _topk,
        "each rank's entries of largest magnitude, gathered; error feedback",
        "Aji & Heafield, Sparse Communication for Distributed Gradient Descent, EMNLP 2017; arXiv 1704.05021",
    ),
    "dgc": Method(
        _dgc_arguments,
        _dgc,
        "top-k with momentum correction, masking and a sampled threshold",
        "Lin et al., Deep Gradient Compression, ICLR 2018; arXiv 1712.01887",
    ),
    "qsgd": Method(
        _qsgd_arguments,
        _qsgd,
        "every entry as a random multiple of its run's norm, in a few bits, gathered",
        "Alistarh et al., QSGD, NeurIPS 2017; arXiv 1610.02132",
    ),
    "terngrad": Method(
        _terngrad_arguments,
        _terngrad,
        "every entry as -s, 0 or s, summed by the ring",
        "Wen et al., TernGrad, NeurIPS 2017; arXiv 1705.07878",
    ),
}
