"""torchft as the carrier of bytes: its Manager names the ranks of an exchange, and decides whether it is committed.

torchft itself is never imported here: a program that has a ``Manager`` has imported it.
"""

import math
import time
import weakref
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from ..engine.collectives import Handle, Nodes, Request, allgather
from ..engine.membership import NoQuorum, PeerLost
from ..engine.owner import in_use
from ..engine.state import Saved
from .plain import PlainCollectives
from .replica_group import ReplicaGroup

_KEY = "hvd_compress"
#: The errors of a lost peer or a broken network; torchft's assertion, if it has closed the process group.
#: Other errors are the program's.
_LOST = (RuntimeError, TimeoutError, OSError, AssertionError)

#: By Manager, the collectives of the compressor that it serves.
_claims = weakref.WeakKeyDictionary[Any, "weakref.ref[TorchftCollectives]"]()


def is_manager(value: object) -> bool:
    """Whether it is a ``torchft.Manager``, or of a class derived from it."""
    return any(c.__name__ == "Manager" and c.__module__.partition(".")[0] == "torchft" for c in type(value).__mro__)


class _Handle:
    """``failure``: why the collective has not started."""

    def __init__(self, works: list[Any], output: Tensor, failure: PeerLost | None = None) -> None:
        self._works, self._output, self._failure = works, output, failure

    def done(self) -> bool:
        return False  # the order of collectives must not depend on timing

    def result(self, timeout: float = math.inf) -> Tensor:
        """Waits as long as the process group's own timeout."""
        if self._failure is not None:
            raise self._failure
        try:
            arrived = [work.wait() for work in self._works]
        except _LOST as error:
            raise PeerLost(f"a collective of torchft's process group has failed: {error}") from error
        if False in arrived:
            raise PeerLost("a collective of torchft's process group was aborted")
        return self._output


class _Client:
    """The client of a ``Manager``. It numbers a quorum by the lighthouse's number, the members, and the step in which
    they first met: a restarted lighthouse begins with 1 again, and torchft would take such a quorum for its last one,
    or read the addresses of an older one in the store."""

    def __init__(self, client: Any) -> None:
        self._client = client
        # The last quorum as the lighthouse has numbered it, and its number here.
        self._last: tuple[int, list[str]] | None = None
        self._number = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def _quorum(self, **request: Any) -> Any:
        quorum = self._client._quorum(**request)
        found = quorum.quorum_id, list(quorum.replica_ids)
        if found != self._last:
            self._last = found
            mixed = zlib.crc32(" ".join([*quorum.replica_ids, str(quorum.max_step)]).encode())
            self._number = quorum.quorum_id + (mixed << 24)  # the manager has an int64
        quorum.quorum_id = self._number
        return quorum


class TorchftCollectives(PlainCollectives):
    """The process group of a ``torchft.Manager``. Before the first quorum this rank is alone. Raises ``ValueError`` for
    an asynchronous quorum, and for spare replicas: ranks without a part in an exchange."""

    ordered = True
    active = True

    def __init__(self, manager: Any) -> None:
        if manager._use_async_quorum:
            raise ValueError(
                "an exchange needs its ranks when it begins: build the torchft.Manager with use_async_quorum=False"
            )
        if manager._replica_world_size_mode.name != "DYNAMIC":
            raise ValueError(
                "all replicas take part in an exchange: build the torchft.Manager with WorldSizeMode.DYNAMIC, got "
                f"{manager._replica_world_size_mode.name}"
            )
        self._manager = manager
        if not isinstance(manager._client, _Client):
            manager._client = _Client(manager._client)
        self._replica_group = ReplicaGroup(manager)
        self.group_size = self._replica_group.size
        self.rank, self.size = 0, 1
        # ``_sent``: direct messages so far, by which peers match them; each commit has numbered as many.
        self._quorum, self._step, self._sent = -1, 0, 0
        # Whether the ranks are as in the last quorum, if that has the same number.
        self._settled = False
        self._device = torch.device("cpu")
        # Why all collectives fail until the next quorum.
        self._lost: PeerLost | None = None
        counts = "rounds_committed", "rounds_taken_back", "quorums_missed"
        self._report = dict.fromkeys((*counts, "quorum_seconds", "commit_seconds"), 0.0)

    def generation(self) -> object:
        return self._manager  # ranks change in start_quorum() only

    def in_nodes(self, nodes: object) -> Nodes:
        raise ValueError("nodes= does not go with a torchft.Manager: ranks inside a replica group are FSDP2's")

    def sums(self, tensor: Tensor) -> bool:
        return not self._is_direct(tensor)

    def start(self, request: Request, name: str) -> Handle:
        if self._lost is not None:
            return _Handle([], request.tensor, self._lost)
        group, tensor = self._group, request.tensor.contiguous()
        self._device = tensor.device
        gathers = request.verb == "allgather"
        shape = (self.size * tensor.shape[0], *tensor.shape[1:]) if gathers else tensor.shape
        try:
            output = tensor.new_empty(shape)
            if request.verb == "allreduce":
                works = [group.allreduce([output.copy_(tensor)], c10d.AllreduceOptions())]
            elif self._is_direct(tensor):
                parts = [tensor] * self.size if gathers else [*tensor.tensor_split(self.size)]
                works = self._messages(parts, output)
            elif gathers:
                works = [group.allgather_into_tensor_coalesced([output], [tensor], c10d.AllgatherOptions())]
            else:
                works = [group.alltoall_base(output, tensor, [], [], c10d.AllToAllOptions())]
        except _LOST as error:
            lost = PeerLost(f"a collective of torchft's process group did not start: {error}")
            return _Handle([], tensor, lost)
        return _Handle(works, output)

    def _is_direct(self, tensor: Tensor) -> bool:
        return bool(tensor.is_cpu and self._group.getBackendName() == "torchft-gloo")

    def _messages(self, parts: list[Tensor], output: Tensor) -> list[Any]:
        """Sends ``parts[r]`` to rank r, whose message is the r-th part of ``output``, as :mod:`.direct` does. Returns
        the works."""
        group, rank, size = self._group, self.rank, self.size
        self._sent += 1
        rows, later = output.tensor_split(size), [(rank + turn) % size for turn in range(1, size)]
        rows[rank].copy_(parts[rank])
        receives = [group.recv([rows[peer]], peer, self._sent) for peer in reversed(later)]
        return receives + [group.send([parts[peer]], peer, self._sent) for peer in later]

    # See Membership.

    @property
    def attempt(self) -> tuple[int, int]:
        return self._step, self._quorum

    def start_quorum(self) -> bool:
        manager = self._manager
        with self._timed("quorum_seconds"):
            self._replica_group.meet()
            try:
                manager.start_quorum()
            except _LOST as error:
                if manager._healing and manager._pending_state_dict is not None:
                    raise RuntimeError(
                        "this peer was sent the state of another one, and a load_state_dict function of the "
                        f"torchft.Manager has failed: {error}"
                    ) from error
                # Or the next call would raise this error again, before it asks for a quorum.
                manager._quorum_future = None
                raise NoQuorum(f"no quorum of torchft: {error}") from error
        return self._enter()

    def _enter(self) -> bool:
        """Takes the ranks of the manager's quorum. Returns whether they have changed. Raises :class:`PeerLost`."""
        manager, before = self._manager, self._quorum
        self._lost = None  # the connections are new
        try:
            rank, failure = manager.participating_rank(), manager.errored()
        except _LOST as error:
            raise PeerLost(f"no quorum of torchft: {error}") from error
        if failure is not None or rank is None:
            raise PeerLost(f"torchft's quorum {manager._quorum_id} has failed: {failure}")
        self.rank, self.size = rank, manager.num_participants()
        self._quorum, self._step = manager._quorum_id, manager.current_step()
        changed, self._settled = self._quorum != before or not self._settled, True
        self._sent = 0 if changed else self._sent
        return changed

    def _vote(self) -> None:
        # A rank that passes this knows that all have received everything: if one commits, all can.
        vote = torch.zeros(1, 1, dtype=torch.uint8, device=self._device)
        with self._timed("commit_seconds"):
            self.start(allgather(vote, "budget"), "").result()

    def _lose(self, error: RuntimeError) -> None:
        self._manager.report_error(error)
        if self._lost is None:
            self._lost = error if isinstance(error, PeerLost) else PeerLost(str(error))
            self._group.abort()

    def commit(self) -> bool:
        try:
            self._vote()
        except PeerLost as error:
            self._lose(error)
        return self._should_commit()

    def fail(self, error: RuntimeError) -> None:
        if isinstance(error, NoQuorum):  # the connections of the last quorum are as good as before
            self._should_commit("quorums_missed")
        else:
            self._lose(error)
            self._should_commit()

    def report(self) -> dict[str, float]:
        return {"peers": float(self.size), **self._report}

    def heal_with(self, save: Callable[[], Saved], load: Callable[[Saved], None]) -> None:
        manager = self._manager
        if in_use(lambda: _claims.get(manager, lambda: None)() not in (None, self)):
            raise ValueError("this torchft.Manager has a compressor already: build one Manager for each")
        _claims[manager] = weakref.ref(self)
        manager._load_state_dict_fns.pop(_KEY, None)
        manager._user_state_dicts.pop(_KEY, None)
        manager.register_state_dict_fn(_KEY, load, save)
        first = {_KEY: manager._load_state_dict_fns.pop(_KEY)}
        others = dict(manager._load_state_dict_fns)
        manager._load_state_dict_fns.clear()
        manager._load_state_dict_fns.update({**first, **others})

    @property
    def _group(self) -> Any:
        """A process group that torchft replaces inside when the quorum changes."""
        return self._manager._pg

    def _should_commit(self, otherwise: str = "rounds_taken_back") -> bool:
        """Votes. ``otherwise``: the counter of an attempt that is not committed."""
        committed = False
        with self._timed("commit_seconds"):
            try:
                committed = self._replica_group.should_commit()
            finally:
                self._settled = self._settled and committed
                self._report["rounds_committed" if committed else otherwise] += 1
        return committed

    @contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._report[what] += time.perf_counter() - begin
