"""Two peers on torchft, threads of one process, for ``doctor``: exit status 1 unless their weights become equal."""

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import torch
from torch import distributed

from .. import recipes

ROUNDS = 3
_LIMIT = timedelta(seconds=20)


def main() -> None:
    from torchft import Manager, ProcessGroupGloo
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(bind="[::]:0", min_replicas=2, join_timeout_ms=10000)

    def peer(number: int) -> list[list[float]]:
        model = torch.nn.Linear(64, 64)  # of other weights in each peer
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        store = distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        manager = Manager(
            pg=ProcessGroupGloo(timeout=_LIMIT),
            load_state_dict=model.load_state_dict,
            state_dict=model.state_dict,
            min_replica_size=2,
            use_async_quorum=False,
            timeout=_LIMIT,
            quorum_timeout=_LIMIT,
            store_addr="localhost",
            store_port=store.port,
            rank=0,
            world_size=1,
            lighthouse_addr=lighthouse.address(),
            replica_id=f"doctor{number}",
        )
        local = recipes.low_bit(model, optimizer, period=1, process_group=manager)
        local.join()
        while manager.current_step() < ROUNDS:
            optimizer.zero_grad()
            model(torch.full((1, 64), number + 1.0, dtype=torch.float32, device="cpu")).sum().backward()
            optimizer.step()
            local.step()
        return [p.tolist() for p in model.parameters()]

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(peer, range(2))
    if first != second:
        print("hvd-compress: weights differ between peers", file=sys.stderr, flush=True)
    os._exit(int(first != second))  # torchft's threads would wait for their timeouts


if __name__ == "__main__":
    main()
