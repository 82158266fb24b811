"""Peers that exchange gradients in each step, in threads: they come, go and fail.

All have the same weights and the same shared state after each committed step, and nothing is lost but what a dead peer
had not sent. Every method either trains through that or refuses a torchft Manager.
"""

from contextlib import nullcontext, suppress
from functools import partial

import pytest
import torch
from harness import DDPRank
from members import Died, Lighthouse
from methods import EACH, FORGETFUL, METHODS, WHOLE
from models import compressed, gradients, mixed_model

from hvd_compress import IWP, DeMo
from hvd_compress.engine import commits
from hvd_compress.engine import state as states

#: Those that keep what they do not send, and those that also round.
CONSERVING = [name for name in METHODS if name not in (*FORGETFUL, *WHOLE)]

#: Methods with what a change of ranks could tear apart: momentum beside the residual, shares, signs, other matrices.
MORE = {
    "iwp-momentum": partial(IWP, density=1 / 16, momentum=0.9, budget_interval=2),
    "demo-sign": partial(DeMo, dense_momentum=0.9, budget_interval=2),
    "demo-orthogonal": partial(DeMo, orthogonal=True, subtract=0.5),
}


class Peer:
    """One rank. ``given``, ``applied``: of compressed parameters, float64: the sum of its gradients, and by committed
    step the ranks times the average. ``seen``: by committed step, weights and shared state."""

    def __init__(self, lighthouse, name, build, seed=0, lr=0.05):
        self.rank = DDPRank(lighthouse, name, mixed_model(seed), build)
        self.model, self.compression, self.member = self.rank.model, self.rank.compression, self.rank.collectives
        self.member.save_user = lambda: {k: v.clone() for k, v in self.model.state_dict().items()}
        self.member.load_user = self.model.load_state_dict
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=lr)
        self.step, self.applied, self.seen, self.after_quorum = 0, {}, {}, lambda: None
        self.given = [torch.zeros(p.shape, dtype=torch.float64) for p in self.compressed()]

    def compressed(self):
        return [p for p in self.model.parameters() if compressed(p)]

    @property
    def attempts(self):
        return self.compression.host.step._attempts

    def train_until(self, step):
        while self.member.step < step:
            self.train()

    def train(self):
        self.optimizer.zero_grad()
        self.member.start_quorum()
        self.after_quorum()
        self.step += 1
        grads = gradients(self.model, seed=1000 * self.step + self.member.name)
        large = [g for p, g in zip(self.model.parameters(), grads, strict=True) if compressed(p)]
        for total, grad in zip(self.given, large, strict=True):
            total += grad.double()
        self.rank.exchange(grads)
        if self.member.should_commit():
            self.applied[self.member.step] = [self.member.size * p.grad.double() for p in self.compressed()]
            self.optimizer.step()
            weights = [p.detach().clone() for p in self.model.parameters()]
            self.seen[self.member.step] = {"weights": weights, "shared": self.shared()}

    def shared(self):
        return states.save(self.attempts._shared())

    def held(self):
        names = [name for name, p in self.model.named_parameters() if compressed(p)]
        return [self.compression.residual(name).double() for name in names]

    def forget(self):
        """What it holds is not in the sum: it has joined with it."""
        for total, held in zip(self.given, self.held(), strict=True):
            total.copy_(held)


def begin(build, count=3, **options):
    lighthouse = Lighthouse()
    peers = {}
    for n in range(count):
        peer = Peer(lighthouse, n, build, **options)
        peers[peer.member] = peer
    return lighthouse, peers


def run(lighthouse, peers, until):
    return lighthouse.run(list(peers), lambda member: peers[member].train_until(until))


def check_equal(everyone):
    """Weights and shared state are bit-equal on all peers after each step that they have committed."""
    steps = sorted({step for peer in everyone for step in peer.seen})
    for step in steps:
        seen = [peer.seen[step] for peer in everyone if step in peer.seen]
        assert all(states.same(seen[0], other) for other in seen[1:]), step
    return steps


def check_conserved(everyone, tolerance):
    applied = {}
    for peer in everyone:
        applied |= peer.applied
    sums = [sum(averages) for averages in zip(*applied.values(), strict=True)]
    sent = [
        sum(given - held for given, held in parts)
        for parts in zip(*(zip(peer.given, peer.held(), strict=True) for peer in everyone), strict=True)
    ]
    for a, b in zip(sums, sent, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=tolerance)


@pytest.mark.parametrize("name", [*EACH, *MORE])
def test_every_method_trains_while_peers_fail_die_and_join(name):
    build = METHODS.get(name) or MORE[name]
    lighthouse, peers = begin(build)
    first, dying, other = peers.values()
    first.member.faults = {2: ("lost", 0), 3: ("lost", 2), 7: ("unsure", None)}
    other.member.faults = {5: ("lost", 4), 9: ("lost", 1)}
    dying.member.faults = {12: ("dies", 1)}
    stay = run(lighthouse, peers, 12)
    assert {*stay} == {first.member, other.member} and first.member.size == 2
    with suppress(Died):
        dying.attempts._settle(False)
    new = Peer(lighthouse, 7, build, seed=5)
    peers = {member: peers[member] for member in stay} | {new.member: new}
    other.member.faults |= {other.member.attempts + 3: ("lost", 1)}
    assert len(run(lighthouse, peers, 18)) == 3
    everyone = [first, dying, other, new]
    assert check_equal(everyone) == [*range(1, 19)] and new.member.size == 3 and 18 in new.seen
    refused = [peer.member.results.count("not committed") for peer in (first, other)]
    assert refused[1] >= 3 and refused[0] == refused[1] + 1  # the step in doubt, which the others have committed
    if name in CONSERVING:
        options = first.compression.options()
        rounds = "fp16" in str(options["values"]) or name == "powersgd"
        check_conserved(everyone, 0.2 if rounds else 1e-3)


@pytest.mark.parametrize("fault", [("lost", 1), ("unsure", None)], ids=str)
def test_a_state_saved_after_a_step_that_this_peer_has_not_committed_is_without_it(fault):
    lighthouse, peers = begin(MORE["demo-sign"])
    for peer in peers.values():
        peer.member.faults = {2: fault}
    before, after = {}, {}

    def body(member):
        peer = peers[member]
        peer.train_until(2)
        before[member] = peer.compression.state_dict()
        peer.train()
        assert member.results[-1] == "not committed"
        after[member] = peer.compression.state_dict()

    lighthouse.run(list(peers), body)
    for part in ("step", "shared"):
        assert all(states.same(before[member][part], after[member][part]) for member in peers)
    velocities = before[next(iter(peers))]["shared"]["method_state"]["dense_velocity"]
    assert velocities["norm.weight"].any()


@pytest.mark.parametrize("name", ["topk", "demo", "powersgd"])
@pytest.mark.parametrize("fault", ["none", "unsure"])
def test_saving_before_the_optimizers_step_changes_nothing(name, fault):
    lighthouse, peers = begin(METHODS[name])
    first = next(iter(peers.values()))
    first.member.faults = {2: (fault, None)}
    commit = first.member.should_commit

    def save_and_commit():
        before = first.shared(), first.held()
        state = first.compression.state_dict()
        assert states.same(before, (first.shared(), first.held()))
        assert state["step"] == first.compression.step - first.attempts.in_doubt
        return commit()

    first.member.should_commit = save_and_commit
    run(lighthouse, peers, 6)
    check_equal(peers.values())
    check_conserved(peers.values(), 0.2 if name == "powersgd" else 1e-3)


@pytest.mark.parametrize("name", ["topk", "iwp-lanes4", "demo"])
@pytest.mark.parametrize("counts", [True, False])
def test_a_step_in_doubt_stays_so_while_healing_fails(name, counts):
    """Twice; then it is known to count, or not, since no peer has seen the result of the vote."""
    lighthouse, peers = begin(METHODS[name])
    first, *others = peers.values()
    first.member.faults = {2: ("unsure", None), 3: ("unhealed", None), 4: ("unhealed", None)}
    for other in others:
        other.member.faults = {} if counts else {2: ("unsure", None)}
    run(lighthouse, peers, 7)
    check_equal(peers.values())
    check_conserved(peers.values(), 1e-3)
    assert first.member.results[2:5] == 3 * ["not committed"]


def test_a_peer_that_was_away_longer_than_steps_are_remembered_sends_its_last_step_once(monkeypatch):
    monkeypatch.setattr(commits, "_REMEMBERED", 2)
    lighthouse, peers = begin(METHODS["topk"])
    run(lighthouse, peers, 3)
    first = next(iter(peers))
    run(lighthouse, {member: peer for member, peer in peers.items() if member is not first}, 8)
    run(lighthouse, peers, 10)
    check_conserved(peers.values(), 1e-3)


def test_a_second_backward_pass_is_refused_before_it_changes_anything():
    lighthouse, peers = begin(METHODS["topk"])
    first = next(iter(peers.values()))
    commit = first.member.should_commit

    def pass_again():
        held = first.held()
        with pytest.raises(RuntimeError, match="no quorum was started"):
            first.rank.exchange(gradients(first.model, seed=1))
        assert states.same(held, first.held())
        return commit()

    first.member.should_commit = pass_again
    run(lighthouse, peers, 3)
    check_equal(peers.values())
    check_conserved(peers.values(), 1e-3)


def test_an_error_after_the_exchange_is_raised_on_its_peer_and_the_others_repeat_the_step():
    class Broken(Exception):
        pass

    lighthouse, peers = begin(METHODS["topk"])
    first = next(iter(peers.values()))
    averaged, exchange = first.compression.dense_averaged, first.rank.exchange

    def breaks(number, grad):
        if first.member.attempts == 2:
            raise Broken
        averaged(number, grad)

    def exchanged(grads):
        with pytest.raises(Broken) if first.member.attempts == 2 else nullcontext():
            exchange(grads)

    first.compression.dense_averaged, first.rank.exchange = breaks, exchanged
    run(lighthouse, peers, 5)
    assert all(member.results[2] == "not committed" for member in peers)
    check_equal(peers.values())
    check_conserved(peers.values(), 1e-3)


def test_peers_whose_weights_differ_raise_when_they_meet_again():
    """One commits a step, the others do not know of it and go on without that one, to the same number of steps."""
    lighthouse, peers = begin(METHODS["topk"])
    _, *others = peers.values()
    for other in others:
        other.member.faults = {2: ("unsure", None)}
    run(lighthouse, peers, 2)
    lighthouse.run(list(peers), lambda member: peers[member].train())
    run(lighthouse, {other.member: other for other in others}, 3)
    assert {member.step for member in peers} == {3}
    seen = []

    def meet(member):
        with pytest.raises(RuntimeError, match="hash of the weights"):
            peers[member].train()
        seen.append(member)

    lighthouse.run(list(peers), meet)
    assert len(seen) == 3


def test_a_warning_says_whether_a_step_is_taken_back_or_in_doubt():
    lighthouse, peers = begin(METHODS["topk"])
    first = next(iter(peers.values()))
    first.member.faults = {1: ("lost", 1), 3: ("unsure", None)}
    warned = []
    first.compression.engine.warn = warned.append
    run(lighthouse, peers, 4)
    assert [text.split(",")[0] for text in warned] == ["a step is taken back", "a vote has failed"]


def test_a_new_peer_has_an_empty_residual_and_one_that_was_behind_keeps_its_own():
    lighthouse, peers = begin(METHODS["topk"])
    first = next(iter(peers.values()))
    run(lighthouse, peers, 3)
    new = Peer(lighthouse, 9, METHODS["topk"], seed=3)
    work = new.compression.engine.works[0]
    work.bucket.residual.fill_(1.0)  # as of a checkpoint
    seen = {}
    new.after_quorum = lambda: seen.setdefault("new", work.bucket.residual.clone())
    # The first peer stands still for a step of the others.
    others = {member: peer for member, peer in peers.items() if peer is not first} | {new.member: new}
    run(lighthouse, others, 5)
    assert not seen["new"].any()
    kept = [held.clone() for held in first.held()]
    first.after_quorum = lambda: seen.setdefault("first", [held.clone() for held in first.held()])
    run(lighthouse, {**peers, **others}, 7)
    assert any(held.any() for held in kept) and states.same(seen["first"], kept)
    check_equal([*peers.values(), new])
