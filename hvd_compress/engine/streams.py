"""CUDA stream order for the work on one bucket, which hooks, exchanges and the user may launch on different streams."""

import torch


class StreamOrder:
    """Makes each piece of work on a bucket wait, on the device, for the previous one. Does nothing on the CPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._event: torch.cuda.Event | None = None

    def enter(self) -> None:
        """Work launched from here on runs after the work launched before the last :meth:`leave`."""
        if self._event is not None:
            torch.cuda.current_stream(self._device).wait_event(self._event)

    def release(self, *tensors: torch.Tensor) -> None:
        """Call between :meth:`enter` and dropping ``tensors``: their memory is not reused before the current stream is
        done with them."""
        if self._device.type == "cuda":
            for tensor in tensors:
                tensor.record_stream(torch.cuda.current_stream(self._device))

    def leave(self) -> None:
        """Marks the end of the work launched since :meth:`enter`."""
        if self._device.type == "cuda":
            if self._event is None:
                self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(self._device))
