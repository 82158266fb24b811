"""The order of work on one bucket that hooks, exchanges and the user launch on different CUDA streams."""

from contextlib import AbstractContextManager, nullcontext

import torch


def stream_order(device: torch.device) -> "StreamOrder":
    """The order of the work on one bucket."""
    return StreamOrder(device) if device.type == "cuda" else _NoStreams()


class StreamOrder(AbstractContextManager[None]):
    """A context for all work on a bucket, each part after the one before, on any stream. May be nested."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._event: torch.cuda.Event | None = None
        self._stream: torch.cuda.Stream | None = None
        self._inputs: set[torch.cuda.Stream] = set()

    def __enter__(self) -> None:
        if self._event is not None or self._inputs:
            current = torch.cuda.current_stream(self._device)
            if self._event is not None:
                current.wait_event(self._event)
            for stream in self._inputs - {current}:
                current.wait_stream(stream)
            self._inputs.clear()

    def __exit__(self, *error: object) -> None:
        if self._event is None:
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record(torch.cuda.current_stream(self._device))

    def note_input(self) -> None:
        """Notes that an input was made on the current stream: the next context waits for it."""
        self._inputs.add(torch.cuda.current_stream(self._device))

    def exchange_stream(self) -> AbstractContextManager[object]:
        """The stream of all of the bucket's exchanges. Tensors that live from one stage of an exchange to the next then
        belong to one stream, and exchanges are not queued behind the backward pass."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        return torch.cuda.stream(self._stream)

    def release(self, tensor: torch.Tensor) -> None:
        """Keeps the memory of a tensor, which may belong to another stream, until the current stream is done with it.
        Called in this context, before the tensor is dropped."""
        tensor.record_stream(torch.cuda.current_stream(self._device))


class _NoStreams(nullcontext[None], StreamOrder):
    """Orders nothing, on the CPU."""

    def note_input(self) -> None:
        pass

    def exchange_stream(self) -> AbstractContextManager[object]:
        return nullcontext()

    def release(self, tensor: torch.Tensor) -> None:
        pass
