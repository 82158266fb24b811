"""What Gloo's collectives cost the processor, measured: ranks in this process that exchange over the loopback."""

import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

from .wire import Message

RANKS, MEGABYTES, WARMUP, REPEATS = 2, 4, 3, 40
_TYPES = {"fp32": torch.float32, "fp16": torch.float16, "int64": torch.int64}


@dataclass(frozen=True)
class Transport:
    """Processor time of collectives, of one rank.

    ``per_byte``: seconds per byte sent, by the verb, and for allreduce by ``verb type``. ``per_hop``: seconds of a
    message of a few bytes from one rank to the next.
    """

    per_byte: dict[str, float]
    per_hop: float

    def seconds(self, message: Message, ranks: int) -> float:
        """Of a rank for the bytes of a collective."""
        key = f"{message.verb} {message.type}" if message.verb == "allreduce" else message.verb
        return self.per_byte[key] * message.sent(ranks)


def measure() -> Transport:
    """In about two seconds. Processor time, so that other programs disturb it little."""
    groups, size = _groups(RANKS), MEGABYTES << 20
    ones = torch.randn(size // 4, dtype=torch.float32, device="cpu") * 0.01
    per_byte: dict[str, float] = {}
    for name, dtype in _TYPES.items():
        per_byte[f"allreduce {name}"] = _allreduce(groups, ones[: size // dtype.itemsize].to(dtype))
    raw = [torch.zeros(size, dtype=torch.uint8, device="cpu") for _ in groups]
    all_of = [torch.zeros(RANKS * size, dtype=torch.uint8, device="cpu") for _ in groups]
    found = _time(lambda rank: groups[rank]._allgather_base(all_of[rank], raw[rank]))
    per_byte["allgather"] = found / Message("allgather", size).sent(RANKS)
    received = [torch.zeros_like(tensor) for tensor in raw]
    found = _time(lambda rank: groups[rank].alltoall_base(received[rank], raw[rank], [], []))
    per_byte["alltoall"] = found / Message("alltoall", size).sent(RANKS)
    few = [torch.zeros(8, dtype=torch.float32, device="cpu") for _ in groups]
    # An allreduce of two ranks is two hops, one after the other.
    per_hop = _time(lambda rank: groups[rank].allreduce([few[rank]])) / 2
    return Transport(per_byte, per_hop)


def _allreduce(groups: list[Any], tensor: torch.Tensor) -> float:
    tensors = [tensor.clone() for _ in groups]
    found = _time(lambda rank: groups[rank].allreduce([tensors[rank]]))
    return found / Message("allreduce", tensor.nbytes).sent(RANKS)


def _groups(ranks: int) -> list[Any]:
    store, made = distributed.HashStore(), list[Any]([None] * ranks)

    def join(rank: int) -> None:
        options = distributed.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        # The host's own name may not resolve.
        options._devices = [distributed.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = timedelta(seconds=60)
        made[rank] = distributed.ProcessGroupGloo(store, rank, ranks, options)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return made


def _time(start: Callable[[int], Any]) -> float:
    """Processor seconds of one rank: the lower quartile, since other programs and the two ranks of this process only
    add to them. Connections and memory are new in the first calls."""
    found = []
    for _ in range(WARMUP + REPEATS):
        begin = time.process_time()
        for work in [start(rank) for rank in range(RANKS)]:
            work.wait()
        found.append((time.process_time() - begin) / RANKS)
    return statistics.quantiles(found[WARMUP:], n=4)[0]
