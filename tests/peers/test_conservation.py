"""Peers come, go and fail in threads: nothing is lost but what a dead peer had not sent."""

import copy
from functools import partial

import pytest
import torch
from harness import mixed_model
from local_workers import Worker
from members import Lighthouse, Member

from hvd_compress import IWP, DCPState, LocalSteps, NoCompression, Quantized, TopK

KINDS = {
    "quantized": partial(Quantized, bits=2, bucket_mb=0.05),
    "iwp": partial(IWP, density=1 / 16, bucket_mb=0.05),
    "topk": partial(TopK, density=1 / 16, bucket_mb=0.05),
    "dense": NoCompression,
}


IN_FLIGHT = {"period": 4, "fragments": 2, "delay": 1}


class Peer(Worker):
    """``kept``: what it has still to send, by parameter, float64. ``applied``: by committed round, the peers times the
    change of the common weights."""

    def __init__(self, lighthouse, name, build, **options):
        super().__init__(lighthouse, name, build, **{"unsent": "buffer", "period": 2, **options})
        self.member, self.applied = self.compression.collectives, {}
        # As users let a Manager heal their model.
        self.member.save_user = lambda: copy.deepcopy(self.model.state_dict())
        self.member.load_user = self.model.load_state_dict
        self.begun_with = None
        self.steps = 0

    def join(self):
        self.local.join()
        # Healing has replaced the weights.
        self.made = [w.own.double() for w in self._all()]
        self.begun_with = [tensor.clone() for tensor in self.made]

    def train_until(self, round_):
        while self.member.step < round_:
            self.local_step(self.steps)
            self.steps += 1
            before, step = [w.common.double() for w in self._all()], self.member.step
            self.local.step()
            if self.member.results[-1] == "committed" and self.member.step == step + 1:
                now = [w.common.double() for w in self._all()]
                self.applied[self.member.step] = [self.member.size * (b - a) for a, b in zip(before, now, strict=True)]
                self.note()

    def note(self):
        pass

    def _all(self):
        return self.local._rounds._common.weights

    def kept(self):
        # With unsent="weights", the residual is a part of the weights beside the progress.
        common = self.local._rounds._common
        held = [0.0 if w.place is None else w.place.work.residual_of(w.place.piece).double() for w in common.weights]
        return [common.advance(w).double() + h for w, h in zip(common.weights, held, strict=True)]

    def take_back(self):
        """No other peer has committed its last round."""
        peers = self.local._rounds._peers
        peers.begin = lambda before_healing: True
        self.local._rounds._round._meet(peers)

    def sent(self):
        """What it has made and not kept."""
        return [made - begun - kept for made, begun, kept in zip(self.made, self.begun_with, self.kept(), strict=True)]


SGD = partial(torch.optim.SGD, lr=0.1)


def matrices_and_others(parameters, make=SGD):
    parameters = list(parameters)
    matrices, others = ([p for p in parameters if (p.dim() == 2) == matrix] for matrix in (True, False))
    return [torch.optim.SGD(matrices, lr=0.1, momentum=0.5), make(others)]


class Averaged(Peer):
    """Matrices take local steps, and the others move by averaged gradients: by SGD, so by their sum.

    ``seen``: by committed round, the common weights and the state of that optimizer.
    """

    def __init__(self, lighthouse, name, build, make=None, **options):
        given = {} if make is None else {"make": make}
        optimizers = {"optimizer": partial(matrices_and_others, **given), "averaged": [1]}
        super().__init__(lighthouse, name, build, **{**optimizers, **options})
        self.seen, (self.by_averages,) = {}, self.averaged
        self.held = {id(p) for group in self.by_averages.param_groups for p in group["params"]}

    def local_step(self, step):
        super().local_step(step)
        for made, p in zip(self.made, self.model.parameters(), strict=True):
            if id(p) in self.held:
                made -= 0.1 * p.grad.double()

    def summed(self):
        return [w for w in self._all() if w.sums is not None]

    def kept(self):
        kept = super().kept()
        for number, w in enumerate(self._all()):
            if w.sums is not None:
                held = 0.0 if w.place is None else w.place.work.residual_of(w.place.piece).double()
                kept[number] = -0.1 * (w.sums.double() + held)
        return kept

    def note(self):
        state = self.by_averages.state_dict()["state"]
        leaves = [leaf.clone() for _, entry in sorted(state.items()) for _, leaf in sorted(entry.items())]
        own = [p.detach().clone() for p in self.model.parameters() if id(p) in self.held]
        self.seen[self.member.step] = [*(w.common.clone() for w in self._all()), *own, *leaves]


def begin(kind, count=3, peer=Peer, **options):
    make, lighthouse = peer, Lighthouse()
    peers = {}
    for n in range(count):
        peer = make(lighthouse, n, KINDS[kind], **options)
        peers[peer.member] = peer
    lighthouse.run(list(peers), lambda member: peers[member].join())
    return lighthouse, peers


def check_conserved(everyone):
    """What all peers have sent is what was applied, with the number of those that took part."""
    applied = {}
    for peer in everyone:
        for step, change in peer.applied.items():
            if step in applied:
                assert all(torch.equal(a, b) for a, b in zip(applied[step], change, strict=True)), step
            applied[step] = change
    sums = [sum(changes) for changes in zip(*applied.values(), strict=True)]
    sent = [sum(parts) for parts in zip(*(peer.sent() for peer in everyone), strict=True)]
    for a, b in zip(sums, sent, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-4)


def check_equal(peers):
    for other in peers[1:]:
        assert all(torch.equal(a, b) for a, b in zip(peers[0].common(), other.common(), strict=True))


@pytest.mark.parametrize(
    ("kind", "options"),
    [*((kind, {}) for kind in KINDS), ("quantized", IN_FLIGHT), ("topk", IN_FLIGHT), ("topk", {"unsent": "weights"})],
    ids=str,
)
@pytest.mark.parametrize("fault", [("lost", 0), ("lost", 1), ("unsure", None)], ids=str)
def test_a_round_that_fails_is_taken_back_and_its_progress_is_in_the_next_one(kind, options, fault):
    lighthouse, peers = begin(kind, **options)
    next(iter(peers)).faults = {3: fault, 4: fault, 7: fault}
    stay = lighthouse.run(list(peers), lambda member: peers[member].train_until(9))
    assert len(stay) == 3
    everyone = list(peers.values())
    expected = "in doubt" if fault[0] == "unsure" else "failed"
    assert everyone[0].member.results.count(expected) == 3
    check_equal(everyone)
    check_conserved(everyone)
    assert not any(p.isnan().any() for peer in everyone for p in peer.weights())


def test_a_round_in_doubt_that_others_have_committed_is_of_its_own_steps_only(monkeypatch):
    lighthouse, peers = begin("quantized")
    peer = next(iter(peers.values()))
    peer.member.faults, turns, ages = {3: ("unsure", None)}, peer.local._rounds.turns, []
    take = turns.take
    monkeypatch.setattr(turns, "take", lambda: (ages.append(turns.age), take()))
    lighthouse.run(list(peers), lambda member: peers[member].train_until(6))
    assert "in doubt" in peer.member.results and {*ages} == {peer.local.period}


@pytest.mark.parametrize("options", [{}, IN_FLIGHT], ids=str)
def test_a_round_that_has_landed_keeps_nothing_to_take_it_back(options):
    lighthouse, peers = begin("quantized", **options)
    lighthouse.run(list(peers), lambda member: peers[member].train_until(4))
    for peer in peers.values():
        peer.local._rounds._round.finish()
        for work in peer.compression.engine.works:
            assert not work._errors and work.unsent() is work.bucket.residual


def test_a_wrong_call_leaves_the_manager_for_the_right_one(monkeypatch):
    healed = []
    monkeypatch.setattr(Member, "heal_with", lambda self, save, load: healed.append(self))
    member = Lighthouse().collectives(0)
    model = mixed_model()
    stranger = torch.optim.SGD([torch.nn.Parameter(torch.ones(3))], lr=0.1)
    with pytest.raises(ValueError, match="parameter"):
        LocalSteps(Quantized(model, collectives=member), stranger, 2)
    averaged = torch.optim.SGD(model.parameters(), lr=0.1)
    with monkeypatch.context() as several, pytest.raises(ValueError, match="replica groups of several ranks"):
        several.setattr(Member, "group_size", 2)
        LocalSteps(Quantized(model, collectives=member), [], 2, on_averaged_gradients=averaged)
    assert not healed
    LocalSteps(Quantized(model, collectives=member), torch.optim.SGD(model.parameters(), lr=0.1), 2)
    assert healed == [member]


def test_ranks_that_come_and_go_have_no_place_in_a_checkpoint_of_all():
    with pytest.raises(ValueError, match=r"save the state_dict\(\) of each"):
        DCPState(Quantized(mixed_model(), collectives=Lighthouse().collectives(0)))


@pytest.mark.parametrize("kind", ["quantized", "topk", "dense"])
@pytest.mark.parametrize("place", [1, None], ids=["in the exchange", "in the vote"])
@pytest.mark.parametrize("make", [Peer, Averaged])
def test_a_peer_dies_and_another_joins(kind, place, make):
    """What the dead one had not sent is lost, and nothing else; the new one has the weights of the others."""
    lighthouse, peers = begin(kind, peer=make)
    dying = list(peers)[1]
    dying.faults = {3: ("dies", place)}
    stay = lighthouse.run(list(peers), lambda member: peers[member].train_until(6))
    assert [member.name for member in stay] == [0, 2] and all(member.size == 2 for member in stay)
    peers[dying].take_back()
    new = make(lighthouse, 3, KINDS[kind], model=mixed_model(seed=5))
    peers[new.member] = new

    def body(member):
        if member is new.member:
            new.join()
        peers[member].train_until(9)

    assert len(lighthouse.run([*stay, new.member], body)) == 3
    check_equal([peers[member] for member in stay] + [new])
    numbers = {member: peers[member].local._rounds.turns.number for member in [*stay, new.member]}
    assert len({*numbers.values()}) == 1, numbers  # what a schedule of the period gets
    # The progress of the dead one counts as far as it was sent before.
    check_conserved(list(peers.values()))
    assert new.member.size == 3


@pytest.mark.parametrize("make", [Peer, Averaged])
def test_a_peer_that_missed_rounds_keeps_its_own_progress(make):
    """It stood still while the others went on."""
    lighthouse, peers = begin("quantized", peer=make)
    slow = peers[next(iter(peers))]
    others = [member for member in peers if member is not slow.member]
    lighthouse.run(list(peers), lambda member: peers[member].train_until(3))
    slow.local_step(slow.steps)
    slow.steps += 1
    slow.local.step()
    before = slow.kept()
    assert any(tensor.abs().max() > 0.01 for tensor in before)
    lighthouse.run(others, lambda member: peers[member].train_until(6))
    lighthouse.run(list(peers), lambda member: peers[member].train_until(8))
    check_equal(list(peers.values()))
    check_conserved(list(peers.values()))


def test_peers_that_differ_in_their_options_raise_an_error_on_all():
    lighthouse = Lighthouse()
    built = [Peer(lighthouse, n, partial(Quantized, bits=2 + n)) for n in range(2)]
    peers = {peer.member: peer for peer in built}
    with pytest.raises(RuntimeError, match="the ranks differ"):
        lighthouse.run(list(peers), lambda member: peers[member].join())


def test_a_peer_of_fewer_steps_counts_equally():
    lighthouse, peers = begin("dense", count=2)
    first, second = peers.values()
    second.local.period = 6
    first.member.faults = {2: ("lost", 1)}  # so its next round is of 4 steps
    before = first.common()[0].double().clone()
    lighthouse.run(list(peers), lambda member: peers[member].train_until(2))
    progress = [(peer.made[0] - peer.begun_with[0], peer.steps) for peer in (first, second)]
    assert [steps for _, steps in progress] == [2, 6]
    want = sum(made for made, _ in progress) / 2
    for peer in (first, second):
        torch.testing.assert_close(peer.common()[0].double() - before, want, rtol=0, atol=1e-5)
    # A round that was taken back counts with the next one.
    lighthouse.run(list(peers), lambda member: peers[member].train_until(3))
    assert [peer.steps for peer in (first, second)] == [6, 18]
    total = [
        peer.made[0] - peer.begun_with[0] - made for peer, (made, _) in zip((first, second), progress, strict=True)
    ]
    want += sum(total) / 2
    torch.testing.assert_close(first.common()[0].double() - before, want, rtol=0, atol=1e-5)


# Optimizers on averaged gradients.


def check_same(everyone):
    """All peers had the same weights and states of optimizers on averaged gradients after each round."""
    rounds = sorted({step for peer in everyone for step in peer.seen})
    for step in rounds:
        first, *others = (peer.seen[step] for peer in everyone if step in peer.seen)
        assert all(len(first) == len(other) for other in others), step
        assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True)), step
    assert len(rounds) > 4


@pytest.mark.parametrize(("kind", "options"), [*((kind, {}) for kind in KINDS), ("quantized", IN_FLIGHT)], ids=str)
@pytest.mark.parametrize("fault", [("lost", 0), ("lost", 1), ("unsure", None)], ids=str)
def test_no_gradient_is_lost_or_counted_twice_where_rounds_fail(kind, options, fault):
    lighthouse, peers = begin(kind, peer=Averaged, **options)
    next(iter(peers)).faults = {3: fault, 4: fault, 7: fault}
    stay = lighthouse.run(list(peers), lambda member: peers[member].train_until(9))
    everyone = list(peers.values())
    assert len(stay) == 3
    check_same(everyone)
    check_equal(everyone)
    check_conserved(everyone)


def adamw(peer, steps=20):
    """An optimizer whose steps depend on its state, and on a rate that falls with the peer's own steps."""
    optimizer = peer.by_averages
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, steps)
    optimizer.register_step_post_hook(lambda *_: schedule.step())


@pytest.mark.parametrize("options", [{}, IN_FLIGHT], ids=str)
@pytest.mark.parametrize("fault", [("lost", 1), ("unsure", None)], ids=str)
@pytest.mark.parametrize("joins", [False, True])
def test_states_travel_to_peers_that_missed_rounds_or_join(options, fault, joins):
    """Also if users let the Manager heal their model only, and where rates differ between peers."""
    made = dict(make=partial(torch.optim.AdamW, lr=0.01), **options)
    lighthouse, peers = begin("quantized", peer=Averaged, **made)
    for peer in peers.values():
        adamw(peer)
    dying = list(peers)[1]
    next(iter(peers)).faults = {2: fault, 3: fault}
    stay = lighthouse.run(list(peers), lambda member: peers[member].train_until(6))
    slow, *others = stay
    dying.faults = {dying.attempts + 2: ("dies", None)} if joins else {}
    # It stood still while the others went on.
    others = lighthouse.run(others, lambda member: peers[member].train_until(9))
    assert (dying in others) != joins
    if joins:
        new = Averaged(lighthouse, 3, KINDS["quantized"], model=mixed_model(seed=5), **made)
        adamw(new)
        peers[new.member] = new

    def body(member):
        if joins and member is new.member:
            new.join()
        peers[member].train_until(13)

    lighthouse.run([slow, *others, *([new.member] if joins else [])], body)
    everyone = list(peers.values())
    check_same(everyone)
    at_the_end = [peer for peer in everyone if 13 in peer.seen]
    assert len(at_the_end) == 3
    assert not any(leaf.isnan().any() for leaf in everyone[0].seen[13])
    counts = {float(state["step"]) for peer in at_the_end for state in peer.by_averages.state.values()}
    assert len(counts) == 1 and counts.pop() > 13


def test_a_healed_peer_goes_on_with_its_own_schedule():
    """torch's schedules compute a rate from the last one."""
    lighthouse, peers = begin("dense", count=2, peer=Averaged)
    lighthouse.run(list(peers), lambda member: peers[member].train_until(1))
    new = Averaged(lighthouse, 3, KINDS["dense"], model=mixed_model(seed=5))
    for peer in peers.values():
        peer.by_averages.param_groups[0]["lr"] = 0.025
    peers[new.member] = new
    lighthouse.run(list(peers), lambda m: new.join() if m is new.member else peers[m].train_until(3))
    assert [peer.by_averages.param_groups[0]["lr"] for peer in peers.values()] == [0.025, 0.025, 0.1]


def test_the_mean_gradient_and_rate_are_of_all_calls():
    """Of peers that have taken unequally many."""
    lighthouse, peers = begin("dense", count=2, peer=Averaged)
    first, second = peers.values()
    second.local.period = 6
    second.by_averages.param_groups[0]["lr"] = 0.2
    before = first.common()[1].clone()
    sums = []
    for peer in (first, second):
        peer.local_step_plain = peer.local_step
        peer.local_step = lambda step, peer=peer: (peer.local_step_plain(step), sums.append(grad_of(peer)))
    lighthouse.run(list(peers), lambda member: peers[member].train_until(2))
    assert len(sums) == 8
    want = before - (2 * 0.1 + 6 * 0.2) / 2 * sum(sums) / 8
    for peer in (first, second):
        torch.testing.assert_close(peer.common()[1], want, rtol=1e-5, atol=1e-6)


def grad_of(peer):
    return [*peer.model.parameters()][1].grad.clone()


def test_a_state_in_flight_is_loaded_by_another_peer():
    """With the calls and the rates that its averages are of."""
    made = dict(make=partial(torch.optim.AdamW, lr=0.01), **IN_FLIGHT)
    lighthouse, peers = begin("quantized", peer=Averaged, count=1, **made)
    (peer,) = peers.values()
    adamw(peer)

    def until_in_flight(member):
        peer.train_until(4)
        while (sent := peer.local._rounds._round._sent) is None or all(w.sums is None for w in sent.fragment.weights):
            peer.local_step(peer.steps)
            peer.steps += 1
            peer.local.step()
        return saved.append(copy.deepcopy(peer.saved()))

    saved = []
    lighthouse.run(list(peers), until_in_flight)
    again, fresh = begin("quantized", peer=Averaged, count=1, **made)
    (other,) = fresh.values()
    other.resume(saved[0])
    other.by_averages.param_groups[0]["lr"] = 1.0  # another place of a schedule
    for world, one in ((lighthouse, peer), (again, other)):
        before = [w.common.clone() for w in one.summed()]
        one.local_step(peer.steps)
        world.run([one.member], lambda member, one=one: one.local.step())
        assert one.idle and any(not torch.equal(b, w.common) for b, w in zip(before, one.summed(), strict=True))
    check_equal([peer, other])


def saved_after(peer, fault, times):
    """What a peer saves when its rounds have failed so often in a row."""
    saved = []

    def until_failed(member):
        peer.train_until(4)
        failed = "in doubt" if fault[0] == "unsure" else "failed"
        member.faults = {member.attempts + n + 1: fault for n in range(times)}
        while member.results[-times:] != [failed] * times:
            peer.local_step(peer.steps)
            peer.steps += 1
            peer.local.step()
        saved.append(copy.deepcopy(peer.saved()))

    peer.member._lighthouse.run([peer.member], until_failed)
    return saved[0]


@pytest.mark.parametrize("options", [{}, {"period": 4, "fragments": 2}, IN_FLIGHT], ids=str)
def test_a_state_has_the_calls_of_rounds_that_were_taken_back(options):
    """The next round's mean gradient and rate are of these, too."""
    made = dict(make=partial(torch.optim.AdamW, lr=0.01), **options)
    (peer,), (other,) = (begin("quantized", peer=Averaged, count=1, **made)[1].values() for _ in range(2))
    other.resume(saved_after(peer, ("lost", 1), 2))
    other.steps, other.member.step = peer.steps, peer.member.step
    for one in (peer, other):
        one.member._lighthouse.run([one.member], lambda member, one=one: one.train_until(8))
    check_equal([peer, other])
    assert all(torch.equal(a, b) for a, b in zip(peer.seen[8], other.seen[8], strict=True))


def test_a_state_in_doubt_counts_no_calls_of_gradients_that_it_does_not_have():
    (peer,), (other,) = (begin("dense", peer=Averaged, count=1)[1].values() for _ in range(2))
    other.resume(saved_after(peer, ("unsure", None), 1))
    assert other.local._rounds.turns.age == 0 and not any(w.sums.any() for w in other.summed())


def test_a_peer_that_joins_has_the_weights_of_the_others_and_no_gradients_of_its_own():
    """Also if the Manager heals nothing but the compressor, and before each fragment has had its turn."""
    options = dict(make=partial(torch.optim.AdamW, lr=0.01), period=4, fragments=2)
    lighthouse, peers = begin("quantized", count=2, peer=Averaged, **options)
    lighthouse.run(list(peers), lambda member: peers[member].train_until(6))
    new = Averaged(lighthouse, 3, KINDS["quantized"], model=mixed_model(seed=5), **options)
    new.member.load_user = lambda state: None
    peers[new.member] = new
    new.local_step(0)
    assert any(w.sums.any() for w in new.summed())

    def body(member):
        if member is new.member:
            new.join()
            for w in new.summed():
                assert torch.equal(w.own, w.common) and not w.sums.any(), w.name
        peers[member].train_until(9)

    lighthouse.run(list(peers), body)
    check_same(list(peers.values()))
