"""Reports of a compressor to its user: residuals, bytes and times, also as metrics for a logger."""

import math
from typing import Any

import torch
from torch import Tensor

from ..engine.arguments import find_name
from ..engine.engine import Engine
from ..engine.membership import Membership
from ..engine.modes import modes_off
from ..engine.shards import local


class Reporting:
    engine: Engine

    @modes_off
    def residual(self, name: str) -> Tensor:
        """This rank's residual of parameter ``name``, the unsent sum of its gradients: a copy, float32, in the shape of
        the parameter or of this rank's shard. Zeros for an uncompressed one, and for one that another rank of the node
        owns. ``name``: also with a wrapper's prefix (``module.weight``). Raises ``KeyError`` for an unknown name."""
        engine = self.engine
        if (found := find_name(name, engine.names)) is None:
            raise KeyError(name)
        number = engine.names.index(found)
        if (place := engine.place_of[number]) is None:
            return torch.zeros_like(local(engine.parameters[number]), dtype=torch.float32)
        with place.work.bucket.order:
            return place.work.residual_of(place.piece).clone()

    @modes_off
    def stats(self) -> dict[str, Any]:
        """The bytes that this rank sent in the last step and in total, without sparse gradients, and those of
        parameters that this compressor does not have.

        ``last`` and ``total`` contain ``dense_bytes`` (a float32 ring allreduce of the gradients), ``wire_bytes`` and
        its parts ``values_bytes``, ``indices_bytes``, ``dense_tensor_bytes``, ``budget_bytes``, ``wire_ratio =
        dense_bytes / wire_bytes``, and ``inside_bytes``, which stay in this rank's node and are in none of the other
        numbers. ``residual_norm``: the L2 norm of all residuals. ``compress_ms``: the median over recent steps of the
        time spent in the compressor without waiting. With a torchft ``Manager``: ``peers`` of the last round;
        ``rounds_committed`` and ``rounds_taken_back`` on this rank; ``quorums_missed``, rounds that did not begin;
        ``quorum_seconds`` and ``commit_seconds``, spent in all of them.
        """
        norms = []
        for place in filter(None, self.engine.place_of):
            with place.work.bucket.order:
                norms.append(place.work.residual_of(place.piece).norm())
        norm = torch.stack([norm.cpu() for norm in norms]).norm().item() if norms else 0.0
        members = self.engine.collectives
        peers = members.report() if isinstance(members, Membership) else {}
        return {"steps": self.engine.step, **self.engine.stats.report(), "residual_norm": norm, **peers}

    def metrics(self) -> dict[str, float]:
        """:meth:`stats` as a flat dict of finite numbers, for a logger such as ``wandb.log(compression.metrics())``. A
        name is ``hvd_compress/`` and the name in ``stats()``; of the total bytes ``hvd_compress/total_wire_bytes`` and
        so on. ``wire_ratio`` is missing while nothing was sent.

        Reads all residuals, and synchronises a GPU: call it every 50 steps, not in each.
        """
        stats = self.stats()
        last, total = stats.pop("last"), stats.pop("total")
        named = {**stats, **last, **{f"total_{key}": value for key, value in total.items()}}
        return {f"hvd_compress/{key}": float(value) for key, value in named.items() if math.isfinite(value)}
