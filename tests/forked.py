"""Forks ranks of torch.distributed, as torchrun would start them, from a process that has imported for all of them:
forked.py RANKS MODULES SCRIPT ARGUMENTS...

If a rank fails, the others are ended. MODULES: separated by commas.
"""

import gc
import importlib
import os
import runpy
import signal
import socket
import sys
import threading
from pathlib import Path


def main() -> None:
    ranks, modules, *sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    # Threads do not survive a fork: one of OpenMP each, and no driver of GPUs before it.
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1", "GLOO_SOCKET_IFNAME": "lo"}
    gc.disable()  # while nothing but modules is made: a tenth of the time of imports
    for module in modules.split(","):
        importlib.import_module(module)
    gc.enable()
    assert len(os.listdir("/proc/self/task")) == threading.active_count() == 1
    with socket.create_server(("127.0.0.1", 0)) as free:
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    os.environ |= {**place, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "TORCHELASTIC_RUN_ID": "none"}
    gc.freeze()  # what looks through all objects need not look at modules
    children = []
    for rank in map(str, range(int(ranks))):
        if child := os.fork():
            children.append(child)
            continue
        os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": "0"}
        runpy.run_path(sys.argv[0], run_name="__main__")
        return
    failed = False
    while children:
        child, status = os.wait()
        children.remove(child)
        if status:
            failed = True
            for other in children:
                os.kill(other, signal.SIGKILL)
    sys.exit(failed)


if __name__ == "__main__":
    main()
