"""What ranks of a replica group on torchft have in common, for replica_group.py."""

import os
import traceback
from datetime import timedelta

import torchft


def manager_of(training, seconds, **place):
    """The ``Manager`` of a training with ``load()`` and ``save()``. ``seconds``: its timeout; ``place``: further
    arguments."""
    return torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=seconds),
        load_state_dict=training.load,
        state_dict=training.save,
        use_async_quorum=False,
        timeout=seconds,
        quorum_timeout=4 * seconds,
        store_addr="localhost",
        hostname="localhost",
        heartbeat_interval=timedelta(milliseconds=50),
        **place,
    )


def run_child(path, body):
    """In a child: ends it after ``body()``. It prints to ``PATH.jsonl``, and errors to ``PATH.err``."""
    for number, suffix in ((1, "jsonl"), (2, "err")):
        os.dup2(os.open(f"{path}.{suffix}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    code = 1
    try:
        body()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)  # torchft's threads would wait for their timeouts
