#!/usr/bin/env python3
"""Start a command on every host of a netlab as ranks of one Horovod job with Gloo; netlab.sh runs this on host 0.

    netlab_gloo.py hvdhost0:1,hvdhost1:1 python SCRIPT ARGS...

This is horovodrun's launcher with its rendezvous server, and netlab_agent.sh instead of ssh.
"""

import os
import shlex
import socket
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from horovod.runner.common.util import safe_shell_exec
from horovod.runner.gloo_run import launch_gloo

AGENT = Path(__file__).resolve().parent / "netlab_agent.sh"


def main(hosts: str, command: list[str]) -> None:
    failed = threading.Event()

    def execute(line: str, slot: Any, events: list[threading.Event]) -> tuple[int, float]:
        """Runs one rank; its failure ends the others."""
        # The agent passes its arguments to a shell, as ssh does.
        status = safe_shell_exec.execute(
            shlex.join([str(AGENT), slot.hostname, line]), index=slot.rank, events=[*events, failed]
        )
        if status != 0:
            failed.set()
        return status, time.time()

    ranks = sum(int(host.rpartition(":")[2]) for host in hosts.split(","))
    settings = SimpleNamespace(hosts=hosts, num_proc=ranks, output_filename=None, verbose=0)
    address = socket.gethostbyname(hosts.partition(":")[0])
    try:
        launch_gloo(command, execute, settings, ["eth0"], dict(os.environ), address)
    except RuntimeError as error:  # the failed rank has printed the reason
        sys.exit(f"netlab_gloo.py: {error}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
