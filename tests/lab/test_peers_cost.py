"""scripts/lab/peers_cost.py: what it takes from the events of peers."""

from types import SimpleNamespace

import peers_cost


def test_what_is_neither_quorum_nor_commit_is_exchange():
    seconds = [[9.0, 9.0, 30.0], [10.0, 10.0, 40.0], [10.5, 10.25, 42.0], [11.0, 10.5, 44.0]]
    peer = SimpleNamespace(events=lambda kind: [{"seconds": found} for found in seconds])
    assert peers_cost.seconds(SimpleNamespace(peers=[peer, peer]), 1) == [0.5, 0.25, 1.25]
