"""Work on one bucket, in order, though hooks, exchanges and the user may each be on a CUDA stream of their own."""

import torch


class StreamOrder:
    """Every piece of work waits for the one before it, on the device, wherever that was launched. Nothing on the
    CPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._event: torch.cuda.Event | None = None

    def enter(self) -> None:
        """What is launched from here on runs after what was launched before the last :meth:`leave`."""
        if self._event is not None:
            torch.cuda.current_stream(self._device).wait_event(self._event)

    def let_go(self, *tensors: torch.Tensor) -> None:
        """After :meth:`enter`: memory that was used until now, on whatever streams, is freed, and nobody gets it before
        they are done with it."""
        if self._device.type == "cuda":
            for tensor in tensors:
                tensor.record_stream(torch.cuda.current_stream(self._device))

    def leave(self) -> None:
        """Marks the end of what was launched."""
        if self._device.type == "cuda":
            if self._event is None:
                self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(self._device))
