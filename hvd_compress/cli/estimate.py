"""``hvd-compress estimate``: step times by method, from compressors measured here and a model of the network.

A step takes the time of the user's computation, of the compressor and of the exchange, minus their overlap: the
exchange of one bucket with half of the compressor's work on the others, and with backward but for the last bucket,
whose trips nothing hides; those of others are at the same time. The processor time of the transport is not counted.
"""

import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ..methods.base import Compressor
from .kernels import Measured
from .methods import ADVISED, BASELINES, MEMORY, METHODS, Shape, is_compressed
from .network import Network

#: The default bucket_mb, in bytes.
BUCKET = int(inspect.signature(Compressor.__init__).parameters["bucket_mb"].default * 2**20)
BACKWARD = 2 / 3  # of forward and backward
#: The least speed-up over dense and fp16 with which a method is recommended.
WORTH = 1.15
SLOWEST, FASTEST = 1e6, 1e12  # the range of break-evens, in bits per second


@dataclass(frozen=True)
class Estimate:
    """One method's figures, means over the ``local_steps`` between two exchanges.

    ``bytes``: sent by a host in a step. ``compress``, ``exchange``, ``step``: seconds of the compressor, of the
    exchange beyond it, and of a step. ``break_even``: the bandwidth in bits per second below which the method beats
    dense and fp16; 0 if it never does, infinity if it does at every bandwidth, None for dense and fp16. ``allowed``:
    whether it trains well with the optimizer. ``inside``: seconds inside a host, a part of the exchange. ``trips``:
    messages between hosts that an exchange waits for, one after the other. ``memory``: bytes that a
    rank takes within an exchange, beside weights and gradients.
    """

    method: str
    bytes: float
    compress: float
    exchange: float
    step: float
    break_even: float | None
    allowed: bool
    inside: float = 0.0
    local_steps: int = 1
    trips: int = 0
    memory: float = 0.0


@dataclass(frozen=True)
class Model:
    """Parameter shapes, and the seconds of a step's forward, backward and update."""

    shapes: Sequence[Shape]
    compute: float

    @property
    def compressed(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes if is_compressed(shape))

    def buckets(self) -> int:
        return max(1, math.ceil(4 * self.compressed / BUCKET))


def step_seconds(model: Model, network: Network, one: Measured, local_steps: int = 1) -> float:
    """The time of a step. One of ``local_steps`` steps exchanges, after its backward if these are more than one; inside
    a host, every step sums gradients."""
    buckets, exchange = model.buckets(), network.seconds(one.bytes)
    behind_backward = BACKWARD * model.compute * (1 - 1 / buckets) if local_steps == 1 else 0.0
    hidden = min(exchange, min(one.seconds, exchange) / 2 + behind_backward)
    in_exchange = (one.seconds + exchange + network.seconds(0, one.trips) - hidden) / local_steps
    return model.compute + in_exchange + inside_seconds(model, network, local_steps)


def inside_seconds(model: Model, network: Network, local_steps: int) -> float:
    """The time inside a host in a step: of its exchange, and with local steps of the sum of gradients in every step."""
    inside = network.inside(model.compressed)
    return inside if local_steps == 1 else inside * (1 + 1 / local_steps)


def memory(model: Model, network: Network, method: str, one: Measured, local_steps: int) -> float:
    """The bytes that a rank takes within an exchange, beside weights and gradients: of its part of the node's entries,
    of one bucket, and what it gathers. Local steps of a method that takes none by default hold the common weights."""
    known, entries, (held, more) = METHODS[method], model.compressed / network.per_node, MEMORY[method]
    common = 4 if known.local_steps == 1 < local_steps else 0
    return entries * (held + common) + min(entries, BUCKET / 4) * more + known.gathers * one.bytes


def estimates(
    model: Model, network: Network, measured: Mapping[str, Measured], optimizer: str, local_steps: int | None = None
) -> list[Estimate]:
    """The estimates of all measured methods: first the advice of docs/choosing.md for the optimizer, in its order;
    then, fastest first, the others that train well with it, and the rest. Dense and fp16 have one level and exchange in
    every step; the others exchange once in ``local_steps``, by default their own."""
    flat = replace(network, per_node=1)
    networks = {method: flat if method in BASELINES else network for method in measured}
    periods = {method: 1 if method in BASELINES else local_steps or METHODS[method].local_steps for method in measured}

    def step(method: str, bits: float) -> float:
        on = replace(networks[method], bits=bits)
        return step_seconds(model, on, measured[method], periods[method])

    def gain(method: str, bits: float) -> float:
        return min(step(base, bits) for base in BASELINES) - step(method, bits)

    def break_even(method: str) -> float:
        """Halves the interval of the bandwidth's logarithm: the gain falls with the bandwidth."""
        if gain(method, SLOWEST) <= 0:
            return 0.0
        if gain(method, math.inf) > 0:
            return math.inf
        low, high = math.log(SLOWEST), math.log(FASTEST)
        for _ in range(40):
            middle = (low + high) / 2
            low, high = (middle, high) if gain(method, math.exp(middle)) > 0 else (low, middle)
        return math.exp(low)

    def estimate(method: str) -> Estimate:
        on, period = networks[method], periods[method]
        total, work = step(method, network.bits), measured[method].seconds / period
        return Estimate(
            method,
            bytes=measured[method].bytes / period,
            compress=work,
            exchange=max(0.0, total - model.compute - work),
            step=total,
            break_even=None if method in BASELINES else break_even(method),
            allowed=optimizer in METHODS[method].optimizers,
            inside=inside_seconds(model, on, period),
            local_steps=period,
            trips=measured[method].trips,
            memory=memory(model, on, method, measured[method], period),
        )

    advised = ADVISED[optimizer]

    def place(one: Estimate) -> int:
        return advised.index(one.method) if one.method in advised else len(advised) + (not one.allowed)

    return sorted(map(estimate, measured), key=lambda one: (place(one), one.step))


def baseline(found: Sequence[Estimate]) -> Estimate:
    return min((one for one in found if one.method in BASELINES), key=lambda one: one.step)


def winner(found: Sequence[Estimate], optimizer: str) -> Estimate:
    """The first advised method (docs/choosing.md) that is worth it; otherwise the fastest that trains well."""
    limit = baseline(found).step / WORTH
    worth = [one for one in found if one.method in ADVISED[optimizer] and one.step <= limit]
    return worth[0] if worth else min((one for one in found if one.allowed), key=lambda one: one.step)


def verdict(found: Sequence[Estimate], optimizer: str, exchange_only: bool = False) -> str:
    """A sentence: the method to use, or that none is recommended. ``exchange_only``: no computation was given, so that
    speed-ups are upper bounds."""
    best, base = winner(found, optimizer), baseline(found)
    if best.step * WORTH > base.step:
        faster = f"{best.method} would be {base.step / best.step:.2f} times as fast" if best is not base else ""
        tail = f" ({faster}; less than {WORTH:g} times is not recommended)" if faster else ""
        return f"Do not use compression here: {base.method} is enough{tail}."
    bound = "at most " if exchange_only else ""
    steps = f" in {best.local_steps} local steps" if best.local_steps > 1 else ""
    text = f"Use {best.method}{steps}: {bound}{base.step / best.step:.1f} times as fast as {base.method}"
    if best.break_even is not None and best.break_even < math.inf:
        text += f", worth it below {rate(best.break_even)}"
    fastest = min((one for one in found if one.allowed), key=lambda one: one.step)
    if fastest.step * WORTH < best.step:
        text += f" ({fastest.method}: {base.step / fastest.step:.1f} times)"
    if best.method.startswith("DeMo"):
        text += "; with torch.optim.SGD without momentum in place of your optimizer, docs/gradients.md"
    if exchange_only:
        text += ". This is an upper bound: the step has no computation without --compute-ms"
    return text + "."


def bound_by_delay(one: Estimate, network: Network) -> str:
    """A sentence, if an exchange waits longer for its trips than for its bytes."""
    delay, wire = 1e3 * network.seconds(0, one.trips), 1e3 * network.seconds(one.bytes * one.local_steps)
    times = f"{one.trips} trips take {delay:,.1f} ms, its bytes {wire:,.1f} ms"
    cure = "Local steps make exchanges rarer, and delay= hides them (docs/local_steps.md)."
    return f"An exchange of {one.method} is bound by the delay: {times}. {cure}" if delay > wire else ""


def rate(bits: float | None) -> str:
    """A bandwidth as text; ``none`` or ``any`` without a break-even."""
    if bits is None:
        return "-"
    if bits == 0:
        return "none"
    if math.isinf(bits):
        return "any"
    return f"{bits / 1e9:.2g} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.3g} Mbit/s"
