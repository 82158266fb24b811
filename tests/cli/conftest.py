"""Signals as in a terminal, for tests that send some."""

import signal

import pytest

from hvd_compress.cli.processes import SIGNALS


@pytest.fixture
def default_signals():
    """Under nohup, or in the background of a script, this program and its children would ignore SIGHUP or SIGINT."""
    before = {number: signal.signal(number, handler) for number, handler in SIGNALS.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
