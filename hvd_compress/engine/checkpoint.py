"""Saving and loading of a compressor's state between steps."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .bucket import Segment
from .engine import Engine, Place

# Increased when a state of an older version can no longer be loaded.
_FORMAT = 2


def save(engine: Engine) -> dict[str, Any]:
    """See :meth:`hvd_compress.Compressor.state_dict`."""
    method = engine.method
    if engine.collecting:
        raise RuntimeError(
            "state_dict() in the middle of a step; call it after optimizer.step() (or reset(), after a failure)"
        )
    engine.undo_skipped_step()
    for bucket in engine.buckets:
        bucket.order.__enter__()
        bucket.apply_deferred()

    def copies(part: Callable[[Segment, Tensor], Tensor]) -> dict[str, dict[str, Tensor]]:
        return {
            p.segment.name: {k: part(p.segment, v).clone() for k, v in p.bucket.state.items()} for p in engine.places
        }

    return {
        "format": _FORMAT,
        "method": type(method).__name__,
        "step": engine.step,
        "tensors": copies(method.saved),
        # Codecs without a zero leave errors in the padding, and these are encoded again.
        "padding": copies(lambda segment, flat: segment.padding(flat)),
        "extra": method.method_state(),
        "wire_stats": engine.stats.state_dict(),
    }


@torch.no_grad()
def load(engine: Engine, state: dict[str, Any]) -> None:
    """See :meth:`hvd_compress.Compressor.load_state_dict`."""
    method = engine.method
    if state.get("method") != type(method).__name__:
        raise ValueError(f"this is the state of {state.get('method')}, and this compressor is {type(method).__name__}")
    if state.get("format") != _FORMAT:
        raise ValueError("this state is of another version of hvd_compress")
    ours, theirs = {place.segment.name for place in engine.places}, set(state["tensors"])
    if ours != theirs:
        raise ValueError(f"state and compressor hold different parameters: {sorted(ours ^ theirs)}")
    for place in engine.places:
        _check_shapes(method, place, state["tensors"][place.segment.name])
    engine.reset()
    for bucket in engine.buckets:
        bucket.order.__enter__()
        bucket.apply_deferred()
    method.load_method_state(state["extra"])
    for bucket, position in engine.places:
        segment = bucket.segments[position]
        for key, flat in bucket.state.items():
            segment.padding(flat).copy_(state["padding"][segment.name][key])
            method.saved(segment, flat).copy_(state["tensors"][segment.name][key])
    for bucket in engine.buckets:
        bucket.order.__exit__()
    engine.step, engine.compared, engine.undoable = state["step"], False, False
    engine.stats.load_state_dict(state["wire_stats"])


def _check_shapes(method: Any, place: Place, tensors: dict[str, Tensor]) -> None:
    for key, flat in place.bucket.state.items():
        loaded, shape = tensors.get(key), tuple(method.saved(place.segment, flat).shape)
        got = "nothing" if loaded is None else f"shape {tuple(loaded.shape)}"
        if loaded is None or loaded.shape != shape:
            raise ValueError(f"{place.segment.name}: {key} needs shape {shape}, the state has {got}")
