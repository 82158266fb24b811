"""Ranks that come and go, in threads, with faults at chosen places: a
:class:`~hvd_compress.engine.membership.Membership` as torchft's."""

import threading
from concurrent.futures import ThreadPoolExecutor

from hvd_compress.carriers.threads import ThreadWorld
from hvd_compress.engine.collectives import allgather
from hvd_compress.engine.membership import PeerLost


class Died(Exception):
    """The rank has died: its thread ends."""


class Lighthouse:
    """Forms quorums of all ranks that are alive."""

    def __init__(self):
        self._condition = threading.Condition()
        self.alive, self._waiting, self._formed, self.quorum = set(), set(), None, 0

    def collectives(self, name):
        return Member(self, name)

    def run(self, members, body):
        """Calls ``body(member)`` in a thread each; those that die are left out from then on. Returns those that
        stay."""
        self.alive = set(members)

        def guarded(member):
            try:
                body(member)
            except Died:
                return None
            finally:
                with self._condition:
                    self.alive.discard(member)
                    self._condition.notify_all()
            return member

        with ThreadPoolExecutor(len(members)) as pool:
            return [member for member in pool.map(guarded, members) if member is not None]

    def meet(self, member):
        """Waits until all that are alive are here. Returns their world, and them in rank order."""
        with self._condition:
            self._waiting.add(member)
            self._condition.notify_all()
            came = self.quorum
            while self.quorum == came:
                if self.alive <= self._waiting:
                    ranks = sorted(self._waiting & self.alive, key=lambda m: m.name)
                    behind = [m for m in ranks if m.step < max(m.step for m in ranks) or not m.worked]
                    source = max(ranks, key=lambda m: (m.worked, m.step))
                    state = (source.save(), source.save_user()) if behind else None
                    self._formed = ThreadWorld(len(ranks), ordered=True), ranks, source, state
                    self.quorum, self._waiting = self.quorum + 1, set()
                    self._condition.notify_all()
                elif not self._condition.wait(30):
                    raise TimeoutError(f"no quorum: {self._waiting} of {self.alive}")
            return self._formed


class Member:
    """Collectives and membership of one rank. ``faults``: by number of the attempt, counted from 0, ``(what, n)``:
    ``"lost"`` or ``"dies"`` at collective ``n``; ``"dies"`` or ``"unsure"`` in the vote if that is None.

    ``save_user``, ``load_user``: of the user's own state.
    """

    ordered = active = True
    group_size = 1

    def __init__(self, lighthouse, name):
        self._lighthouse, self.name, self.faults = lighthouse, name, {}
        self.rank, self.size, self.step, self.attempts, self.worked = 0, 1, 0, -1, False
        self._quorum = self._counted = 0
        self.results = []
        self.save_user, self.load_user = lambda: None, lambda state: None
        self.lost = None

    def __repr__(self):
        return f"peer {self.name}"

    def generation(self):
        return self._lighthouse

    def registry(self):
        return ThreadWorld(1).registries[0]

    def sums(self, tensor):
        return True

    def may_differ(self, device):
        return False

    def realign(self):
        pass

    def check_in(self):
        return list

    def in_nodes(self, nodes):
        raise ValueError(nodes)

    @property
    def attempt(self):
        return self.step - self._counted, self._quorum

    def start_quorum(self):
        self._world, ranks, source, state = self._lighthouse.meet(self)
        self._quorum, self._counted, self._started = self._lighthouse.quorum, 0, 0
        self.attempts += 1
        self.rank, self.size = ranks.index(self), len(ranks)
        self._collectives = self._world.collectives(self.rank)
        self._voted, self.lost = False, None
        if state is not None and self is not source and (self.step < source.step or not self.worked):
            self.step = source.step
            self.load(state[0])
            self.load_user(state[1])
        return True

    def start(self, request, name):
        fault, place = self.faults.get(self.attempts, (None, -1))
        if place == self._started:
            self._world._fail(PeerLost(fault))
            if fault == "dies":
                raise Died
        self._started += 1
        try:
            return _Handle(self._collectives.start(request, name))
        except RuntimeError as error:
            return _Failed(PeerLost(str(error)))

    def _vote(self):
        import torch

        fault, place = self.faults.get(self.attempts, (None, -1))
        if place is None and fault == "dies":
            self._world._fail(PeerLost(fault))
            raise Died
        self.start(allgather(torch.zeros(1, 1), "budget"), "vote").result()
        self._voted = True
        if place is None and fault == "unsure":
            raise PeerLost("the vote's result is lost")

    def _lose(self, error):
        if self.lost is None and not self._voted:
            self._world._fail(error)
        self.lost = self.lost or error

    def should_commit(self):
        if self.lost is not None:
            self.results.append("not committed")
            return False
        self.step, self._counted, self.worked = self.step + 1, 1, True
        self.results.append("committed")
        return True

    def commit(self):
        try:
            self._vote()
        except PeerLost as error:
            self.lost = error
            self.results.append("in doubt")
            return False
        return self.should_commit()

    def fail(self, error):
        self._lose(error)
        self.results.append("failed")

    def report(self):
        return {"peers": float(self.size)}

    def heal_with(self, save, load):
        self.save, self.load = save, load


class _Failed:
    def __init__(self, error):
        self._error = error

    def done(self):
        return False

    def result(self, timeout=60.0):
        raise self._error


class _Handle:
    def __init__(self, handle):
        self._handle = handle

    def done(self):
        return False

    def result(self, timeout=60.0):
        try:
            return self._handle.result(timeout)
        except RuntimeError as error:
            raise PeerLost(str(error)) from error
