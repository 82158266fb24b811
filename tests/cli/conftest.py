"""Signals as in a terminal, for tests that send some."""

import signal

import pytest


@pytest.fixture
def default_signals():
    """Under nohup, or in the background of a script, this program and its children would ignore SIGHUP or SIGINT."""
    defaults = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGTERM: signal.SIG_DFL,
        signal.SIGHUP: signal.SIG_DFL,
    }
    before = {number: signal.signal(number, handler) for number, handler in defaults.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
