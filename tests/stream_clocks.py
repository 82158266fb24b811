"""CUDA streams on the CPU: finds work that is not ordered after what it depends on.

Tensors stay on the CPU, where each operation is complete at once. Vector clocks keep what a GPU would guarantee: an
operation knows those before it on its stream, those of the events that its stream has waited for, and what the host had
waited for when it was launched. A *race* is an operation that does not know of an earlier write to memory that it reads
or writes, or of an earlier read of memory that it writes; or an allocation on a stream that does not know of the last
uses of memory that it had before, unless ``record_stream()`` was told of these.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

#: By stream, how many of its operations are known.
Clock = dict["Stream", int]

# They read or write no entries.
_WITHOUT_ENTRIES = {"set_", "detach", "resize_", "empty", "new_empty", "empty_like", "empty_strided"}


def join(clock: Clock, other: Clock) -> None:
    for stream, count in other.items():
        clock[stream] = max(count, clock.get(stream, 0))


class Stream:
    def __init__(self, gpu: "GPU", name: str) -> None:
        self._gpu, self.name, self.clock = gpu, name, Clock()

    def wait_event(self, event: "Event") -> None:
        self._gpu.find_free()
        join(self.clock, event.clock)

    def wait_stream(self, other: "Stream") -> None:
        self._gpu.find_free()
        join(self.clock, other.clock)

    def launch(self) -> None:
        """Begins an operation on this stream."""
        join(self.clock, self._gpu.host)
        self.clock[self] = self.clock.get(self, 0) + 1

    def __repr__(self) -> str:
        return self.name


class Event:
    def __init__(self, gpu: "GPU") -> None:
        self._gpu, self.clock = gpu, Clock()

    def record(self, stream: Stream) -> None:
        self._gpu.find_free()
        self.clock = dict(stream.clock)


class _Access(NamedTuple):
    stream: Stream
    count: int
    place: str

    def known(self, clock: Clock) -> bool:
        return clock.get(self.stream, 0) >= self.count


class _Memory:
    """The memory of one storage, which belongs to the stream on which it was allocated."""

    def __init__(self, stream: Stream) -> None:
        self.stream, self.recorded = stream, set[Stream]()
        self.write: _Access | None = None
        self.reads = dict[Stream, _Access]()

    @property
    def accesses(self) -> list[_Access]:
        return [*([self.write] if self.write else []), *self.reads.values()]


class GPU(TorchDispatchMode):
    """One GPU, whose streams are in the place of ``torch.cuda``'s while the test runs. A context, in which operations
    are noted. ``races``: what was found."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.host, self.races = Clock(), list[str]()
        self._memory, self._free = dict[int, tuple[StorageWeakRef, _Memory]](), list[_Memory]()
        self.default = self.current = self.stream("default")
        self._streams = 0
        for name, replacement in {
            "current_stream": lambda device=None: self.current,
            "default_stream": lambda device=None: self.default,
            "Stream": lambda device=None: self.stream(),
            "Event": lambda: Event(self),
            "stream": self.on,
        }.items():
            monkeypatch.setattr(torch.cuda, name, replacement)
        monkeypatch.setattr(Tensor, "record_stream", lambda tensor, stream: self._of(tensor).recorded.add(stream))

    def stream(self, name: str = "") -> Stream:
        if not name:
            self._streams += 1
        return Stream(self, name or f"stream {self._streams}")

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def outside(self) -> Any:
        """A context in which operations are not noted."""
        return _disable_current_modes()

    def allocated(self, tensor: Tensor, stream: Stream) -> None:
        """Notes that the tensor's memory belongs to a stream."""
        self._of(tensor, stream)

    def access(self, tensor: Tensor, write: bool, stream: Stream) -> None:
        """Notes that the last operation of a stream reads or writes a tensor."""
        if tensor.numel() == 0:
            return
        memory, mine = self._of(tensor), _Access(stream, stream.clock[stream], _place())
        for other in memory.accesses if write else memory.accesses[: memory.write is not None]:
            if not other.known(stream.clock):
                self._found(f"{stream}, at {mine.place}, does not wait for {other.stream}, at {other.place}")
        if write:
            memory.write, memory.reads = mine, {}
        else:
            memory.reads[stream] = mine

    def find_free(self) -> None:
        """Looks for memory that has become free."""
        for key in [key for key, (reference, _) in self._memory.items() if reference.expired()]:
            self._free.append(self._memory.pop(key)[1])

    def _allocate(self, stream: Stream) -> _Memory:
        """Memory of a stream, which may be any that it had before."""
        self.find_free()
        known = dict(stream.clock)
        join(known, self.host)
        for memory in [memory for memory in self._free if memory.stream is stream]:
            self._free.remove(memory)
            for other in memory.accesses:
                if other.stream not in {stream, *memory.recorded} and not other.known(known):
                    self._found(f"{stream}, at {_place()}, takes memory that {other.stream}, at {other.place}, may use")
        return _Memory(stream)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.find_free()
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        reads, writes = list[Tensor](), list[Tensor]()
        for index, argument in enumerate(func._schema.arguments):
            given = kwargs.get(argument.name, args[index] if index < len(args) else None)
            written = argument.alias_info is not None and argument.alias_info.is_write
            (writes if written else reads).extend(_tensors(given))
        old = {_key(tensor) for tensor in reads + writes}
        new = [tensor for tensor in _tensors(result) if _key(tensor) not in old]
        for tensor in new:
            self._of(tensor)
        view = not writes and not new and bool(_tensors(result))
        if view or func._schema.name.partition("::")[2] in _WITHOUT_ENTRIES:
            return result
        self.current.launch()
        for tensor in reads:
            self.access(tensor, False, self.current)
        for tensor in writes + new:
            self.access(tensor, True, self.current)
        return result

    def _of(self, tensor: Tensor, stream: Stream | None = None) -> _Memory:
        key = _key(tensor)
        if key not in self._memory:
            reference = StorageWeakRef(tensor.untyped_storage())  # as long as it lives, no other storage has this key
            self._memory[key] = reference, self._allocate(stream or self.current)
        return self._memory[key][1]

    def _found(self, race: str) -> None:
        if race not in self.races:
            self.races.append(race)


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _tensors(values: Any) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]


def _place() -> str:
    """The innermost lines of the package, or of a test."""
    names, frame = list[str](), sys._getframe(1)
    while frame is not None and len(names) < 4:
        path = frame.f_code.co_filename
        if path != __file__ and ("hvd_compress" in path or "tests" in path):
            names.append(f"{Path(path).name}:{frame.f_lineno}")
        frame = frame.f_back
    return " < ".join(names)
