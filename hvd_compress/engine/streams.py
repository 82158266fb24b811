"""CUDA stream order for the work on one bucket, which hooks, exchanges and the user may launch on different streams."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


class StreamOrder:
    """A context for every piece of work on a bucket: on the device it runs after the previous one, on whichever stream
    that was. May be nested. Does nothing on the CPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._event: torch.cuda.Event | None = None
        self._stream: torch.cuda.Stream | None = None

    def __enter__(self) -> None:
        if self._event is not None:
            torch.cuda.current_stream(self._device).wait_event(self._event)

    def __exit__(self, *error: object) -> None:
        if self._device.type == "cuda":
            if self._event is None:
                self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(self._device))

    def exchange_stream(self) -> AbstractContextManager[Any]:
        """The stream of all of the bucket's exchanges. Tensors that live from one stage of an exchange to the next then
        belong to one stream, and exchanges are not queued behind the backward pass."""
        if self._device.type != "cuda":
            return nullcontext()
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        return torch.cuda.stream(self._stream)

    def release(self, *tensors: torch.Tensor) -> None:
        """Call in this context, before dropping ``tensors`` that another stream may own: their memory is not reused
        before the current stream is done with them."""
        if self._device.type == "cuda":
            for tensor in tensors:
                tensor.record_stream(torch.cuda.current_stream(self._device))
