"""Peers on torchft, as processes: they die, stop and join."""

import signal
import time
from contextlib import nullcontext
from datetime import timedelta
from unittest.mock import Mock, patch

import pytest
import torch
from fleet import Fleet
from torch import distributed

from hvd_compress import (
    IWP,
    DeMo,
    LocalSteps,
    NoCompression,
    average_gradients,
    ddp_hook,
    recipes,
    register_fsdp_hooks,
)
from hvd_compress.carriers.torchft import TorchftCollectives, _Client
from hvd_compress.engine.collectives import allgather, alltoall

torchft = pytest.importorskip("torchft", reason="torchft is not installed")
coordination = pytest.importorskip("torchft.coordination")


def check(fleet, lost=2):
    """All peers that stay had the same common weights after each round, and lost at most so many of them."""
    assert fleet.different() == []
    for peer in fleet.staying:
        assert len(peer.events("taken back")) <= lost
    assert all(event["same"] for peer in fleet.staying for event in peer.events("round"))


@pytest.mark.parametrize("point", ["exchange", "voted"])
@pytest.mark.parametrize(
    "settings",
    [{"recipe": "low_bit"}, {"averaged": True}, pytest.param({"recipe": "diloco"}, marks=pytest.mark.slow)],
    ids=lambda settings: "".join(map(str, settings.values())),
)
def test_a_peer_dies_in_a_round_and_another_one_takes_its_place(point, settings):
    with Fleet(rounds=10**6, pause=0.05, **settings) as fleet:
        fleet.add(3)
        fleet.wait_for_rounds(3, 90)
        victim = fleet.peers[1]
        victim.tell(point)
        fleet.wait(lambda: not victim.alive, 60, "the end of a peer")
        fleet.wait_for_rounds(2, 60)
        new = fleet.add()
        fleet.wait(lambda: new.events("round"), 90, "a round of the new peer")
        fleet.wait_for_rounds(2, 60)
        assert new.events("round")[-1]["peers"] == 3
        assert all(
            peer.events("round")[-1]["states"] == 3 * fleet.settings.get("averaged", False) for peer in fleet.peers
        )
        check(fleet)


@pytest.mark.slow
def test_a_peer_that_stands_still_is_left_behind_and_comes_back():
    with Fleet(
        rounds=10**6, pause=0.05, timeout=3.0, period=4, options=dict(fragments=2, delay=1, bucket_mb=0.01)
    ) as f:
        f.add(3)
        f.wait_for_rounds(3, 90)
        slow, others = f.peers[0], f.peers[1:]
        slow.send(signal.SIGSTOP)
        first = max(peer.step for peer in others)
        f.wait(lambda: all(peer.step > first + 3 for peer in others), 60, "rounds of the others")
        slow.send(signal.SIGCONT)
        f.wait_for_rounds(3, 60)
        assert f.different() == [] and slow.events("round")[-1]["peers"] == 3


@pytest.mark.slow
def test_a_lighthouse_that_is_killed_and_comes_back_costs_no_round():
    # Without retries, torchft waits as long as its quorum_timeout, and raises an error.
    with Fleet(rounds=10**6, pause=0.05, timeout=3.0, quorum_retries=0) as fleet:
        fleet.add(2)
        fleet.wait_for_rounds(3, 90)
        before = [len(peer.events("taken back")) for peer in fleet.peers]
        fleet.kill_lighthouse()
        time.sleep(2)  # all peers ask for a quorum
        fleet.start_lighthouse()
        fleet.wait_for_rounds(3, 60)
        assert [len(peer.events("taken back")) for peer in fleet.peers] == before
        check(fleet)


def test_a_quorum_has_its_number_until_its_members_change_or_a_lighthouse_begins_again():
    class Client:
        def _quorum(self, number, members, step):
            quorum = QuorumResult()
            quorum.quorum_id, quorum.replica_ids, quorum.max_step = number, members, step
            return quorum

    QuorumResult = pytest.importorskip("torchft._torchft").QuorumResult
    both, other, peers = ["a:1", "b:1"], ["a:1", "b:2"], [_Client(Client()), _Client(Client())]
    answers = [(1, both, 0), (1, both, 1), (2, both, 2), (1, both, 3), (1, other, 3), (2, other, 5)]
    numbers = [peers[0]._quorum(number=n, members=m, step=s).quorum_id for n, m, s in answers]
    assert numbers[0] == numbers[1] and len(set(numbers)) == 5 and max(numbers) < 2**63
    # A peer that joins has the same number as the others.
    assert peers[1]._quorum(number=1, members=other, step=3).quorum_id == numbers[4]


def manager(**options):
    store = distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    seconds = timedelta(seconds=10)
    lighthouse = coordination.LighthouseServer(bind="[::]:0", min_replicas=1)
    made = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=seconds),
        min_replica_size=1,
        timeout=seconds,
        quorum_timeout=seconds,
        store_addr="localhost",
        store_port=store.port,
        rank=0,
        world_size=1,
        lighthouse_addr=lighthouse.address(),
        load_state_dict=lambda state: None,
        state_dict=dict,
        **{"use_async_quorum": False, **options},
    )
    made.kept_for_test = store, lighthouse
    return made


@pytest.fixture
def alone():
    made = manager()
    yield made
    made.shutdown(wait=False)


def linear():
    model = torch.nn.Linear(64, 64)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def test_one_peer_trains_alone_and_counts_its_rounds(alone):
    model, optimizer = linear()
    local = recipes.low_bit(model, optimizer, 2, process_group=alone)
    local.join()
    for step in range(4):
        model(torch.ones(1, 64)).sum().backward()
        optimizer.step()
        assert local.step() == (step % 2 == 1)
    stats = local.compression.metrics()
    assert stats["hvd_compress/peers"] == 1.0 and stats["hvd_compress/rounds_committed"] == 3.0
    assert stats["hvd_compress/rounds_taken_back"] == 0.0 and stats["hvd_compress/quorum_seconds"] > 0.0


def test_a_round_without_a_quorum_is_not_taken_back_and_the_next_one_sends_its_progress(alone):
    model, optimizer = linear()
    local = LocalSteps(NoCompression(model, process_group=alone), optimizer, 1)
    local.join()
    weights, quorum = model.weight.detach().clone(), alone._client._quorum

    def step():
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.step()
        with pytest.warns(UserWarning, match="a round has not begun") if fails else nullcontext():
            return local.step()

    alone._client._quorum = fails = Mock(side_effect=TimeoutError("no lighthouse"))
    assert not step()
    alone._client._quorum, fails = quorum, None
    assert step()
    stats = local.compression.stats()
    assert (stats["quorums_missed"], stats["rounds_taken_back"], stats["rounds_committed"]) == (1.0, 0.0, 2.0)
    torch.testing.assert_close(local._rounds._common.weights[0].common, weights - 0.2)


def test_a_quorum_that_has_failed_closes_the_connections_at_once(alone):
    """Or the others would wait for this peer."""
    model, optimizer = linear()
    local = LocalSteps(NoCompression(model, process_group=alone), optimizer, 1)
    local.join()
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.step()
    start = alone.start_quorum

    def fails():
        start()
        alone.report_error(RuntimeError("the state has not arrived"))

    failing, closed = patch.object(alone, "start_quorum", fails), patch.object(alone._pg, "abort")
    with failing, closed as abort, pytest.warns(UserWarning, match="the state has not arrived"):
        assert not local.step()
    abort.assert_called_once_with()
    optimizer.step()
    assert local.step()


def test_what_peers_gather_goes_as_direct_messages_on_gloo(alone):
    """In a trip, where Gloo's allgather takes N - 1 with handshakes. Receives are posted before."""
    collectives, tensor = TorchftCollectives(alone), torch.arange(6.0)
    collectives.rank, collectives.size, group = 1, 3, Mock()
    group.getBackendName.return_value = "torchft-gloo"
    with patch.object(alone, "_pg", group):
        collectives.start(allgather(tensor), "x")
        posted = [(call[0], call[1][0][0].tolist(), *call[1][1:]) for call in group.method_calls[1:]]
        assert [(name, peer, tag) for name, _, peer, tag in posted] == [
            ("recv", 0, 1), ("recv", 2, 1), ("send", 2, 1), ("send", 0, 1)
        ]  # fmt: skip
        assert all(data == tensor.tolist() for name, data, *_ in posted if name == "send")
        group.reset_mock()
        output = collectives.start(alltoall(tensor), "x")._output
        posted = [(call[0], call[1][0][0].tolist(), *call[1][1:]) for call in group.method_calls[1:]]
        assert posted[2:] == [("send", [4.0, 5.0], 2, 2), ("send", [0.0, 1.0], 0, 2)]
        assert output[2:4].tolist() == [2.0, 3.0]
        group.getBackendName.return_value = "torchft-nccl"
        group.reset_mock()
        collectives.start(allgather(tensor), "x")
        assert not group.recv.called and group.allgather_into_tensor_coalesced.called


def test_a_state_is_saved_and_loaded_by_any_peer(alone):
    model, optimizer = linear()
    local = recipes.low_bit(model, optimizer, 1, process_group=alone)
    local.join()
    model(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    assert local.step()
    state = local.state_dict()
    local.load_state_dict(state)
    assert local.compression.step == 2


def test_what_does_not_fit_is_an_error(alone):
    model, optimizer = linear()
    local = recipes.low_bit(model, optimizer, 2, process_group=alone)
    with pytest.raises(ValueError, match=r"this torchft.Manager has a compressor already"):
        recipes.low_bit(*linear(), 2, process_group=alone)
    with pytest.raises(RuntimeError, match=r"load other ones before join\(\)"):
        local.take_weights()
    with pytest.raises(ValueError, match=r"nodes= does not go with a torchft.Manager"):
        recipes.low_bit(*linear(), 2, process_group=alone, nodes=2)


def test_an_asynchronous_quorum_is_refused():
    made = manager(use_async_quorum=True)
    try:
        with pytest.raises(ValueError, match="use_async_quorum=False"):
            recipes.low_bit(*linear(), 2, process_group=made)
        with pytest.raises(ValueError, match="use_async_quorum=False"):
            IWP(linear()[0], process_group=made)
    finally:
        made.shutdown(wait=False)


@pytest.fixture
def world():
    """torch.distributed of one rank."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


HOSTS = {
    "ddp": lambda model, compression: ddp_hook(compression, None),
    "fsdp": register_fsdp_hooks,
    "loop": lambda model, compression: average_gradients(compression),
    "horovod": lambda model, compression: compression.compress(next(model.parameters())),
}


def _loads(model, compression):
    compression.load_state_dict(compression.state_dict())


def _steps(model, compression):
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    torch.optim.SGD(model.parameters(), 0.1).step()


@pytest.mark.parametrize("before", [lambda *_: None, _loads, _steps], ids=["at once", "after a load", "after a step"])
@pytest.mark.parametrize("build", [IWP, DeMo, NoCompression])
@pytest.mark.parametrize("host", HOSTS)
def test_gradients_in_each_step_name_local_steps(alone, world, host, build, before):
    model, _ = linear()
    compression = build(model, process_group=alone)
    before(model, compression)
    with pytest.raises(RuntimeError, match=r"ranks come and go: use local steps.*low_bit\(model, optimizer, period"):
        HOSTS[host](model, compression)
