"""The order of the work on a bucket, seen by a recorder in the place of CUDA streams."""

from contextlib import contextmanager

import pytest
from harness import HOSTS, random_steps, replicas

from hvd_compress import IWP


class Recorder:
    """Notes the stream on which each piece of work begins and ends."""

    def __init__(self):
        self.stream, self.seen = "host", []

    def __enter__(self):
        self.seen.append(self.stream)

    def __exit__(self, *error):
        self.seen.append(self.stream)

    def note_input(self):
        """Inputs are made on the host's stream."""

    @contextmanager
    def exchange_stream(self):
        self.stream = "exchange"
        yield
        self.stream = "host"

    def release(self, *tensors):
        """Nothing to keep."""


@pytest.mark.parametrize("host", HOSTS)
def test_the_hosts_stream_waits_for_the_averages(host):
    world, ranks = replicas(2, IWP, host=host)
    for work in ranks[0].compression.engine.works:
        work.bucket.order = Recorder()
    random_steps(world, ranks, [0])
    for work in ranks[0].compression.engine.works:
        seen = work.bucket.order.seen
        assert "exchange" in seen and seen[-1] == "host", "the averages are given back before they are written"
