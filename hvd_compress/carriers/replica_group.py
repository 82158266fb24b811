"""The ranks of one torchft replica group, each of which exchanges its own shards: they commit a round together."""

from typing import Any

from torch.distributed import DistStoreError, PrefixStore


class ReplicaGroup:
    """Values on which the ranks of a group agree, beside torchft's own vote.

    torchft heals a group by the step of one of its ranks. If another rank could not be healed, it would go on with old
    shards, so the ranks compare their steps before each quorum, through the group's store.
    """

    def __init__(self, manager: Any) -> None:
        self._manager, self.size, self._meetings = manager, int(manager._group_world_size), 0

    def meet(self) -> None:
        """Waits for all ranks of the group. Raises ``RuntimeError`` if one has not come in the manager's
        ``quorum_timeout``, or, on all of them, if they have committed different numbers of rounds."""
        if self.size == 1:
            return
        manager, self._meetings = self._manager, self._meetings + 1
        # A store may outlive the group: torchrun keeps its own over restarts.
        store = PrefixStore(f"hvd_compress/{manager._store.get('replica_id').decode()}", manager._store)
        keys = [f"{self._meetings}/{rank}" for rank in range(self.size)]
        store.set(keys[manager._group_rank], str(manager.current_step()))
        try:
            store.wait(keys, manager._quorum_timeout)
        except DistStoreError as error:
            missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
            raise RuntimeError(
                f"ranks {missing} of this replica group have not come to a round in {manager._quorum_timeout}: start "
                "all ranks of the group again"
            ) from error
        steps = [int(store.get(key)) for key in keys]
        # All ranks have come to this meeting, so they have read the keys of those before it.
        store.delete_key(f"{self._meetings - 2}/{manager._group_rank}")
        if len({*steps}) > 1:
            raise RuntimeError(
                f"the ranks of this replica group have committed {steps} rounds, since some of them could not be "
                "healed: start all ranks of the group again"
            )

    def should_commit(self) -> bool:
        """torchft's decision, the same on all ranks of the group. Raises ``RuntimeError`` if one does not come."""
        manager = self._manager
        if self.size == 1:
            return bool(manager.should_commit())
        try:
            # Another rank may come after the timeout of a collective that this one has not waited for.
            return bool(manager.should_commit(timeout=2 * manager._timeout))
        except TimeoutError as error:
            raise RuntimeError(
                "a rank of this replica group has not come to the end of a round: start all ranks of the group again"
            ) from error
