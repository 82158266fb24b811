"""Times calls that start a collective of Horovod, and the collective, with the process sets of two nodes of two ranks:
given to ``hvd.init()``, or ``"dynamic"``: Horovod then asks all ranks for new sets in each cycle, and holds a lock.

    bash scripts/lab/netlab.sh up 2 1gbit 10ms
    for kind in given dynamic; do bash scripts/lab/netlab.sh run 2x2 scripts/lab/process_sets.py $kind; done
"""

import argparse
import os
import statistics
import time

import torch

RANKS = {"node": [[0, 1], [2, 3]], "place": [[0, 2], [1, 3]]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=["given", "dynamic"])
    parser.add_argument("--times", type=int, default=60, help="of one collective after another")
    args = parser.parse_args()
    import horovod.torch as hvd

    if args.kind == "given" and os.environ.pop("HOROVOD_DYNAMIC_PROCESS_SETS", None):
        raise SystemExit("process_sets.py: HOROVOD_DYNAMIC_PROCESS_SETS is set: its sets are dynamic")
    sets = {name: [hvd.ProcessSet(ranks) for ranks in rows] for name, rows in RANKS.items()}
    every = [one for row in sets.values() for one in row]
    hvd.init(process_sets=every if args.kind == "given" else "dynamic")
    if args.kind == "dynamic":
        for one in every:
            hvd.add_process_set(one)
    assert hvd.size() == 4, "two nodes of two ranks"
    own = {name: next(one for one in row if one.included()) for name, row in sets.items()}
    for name, members in {**own, "all": hvd.global_process_set}.items():
        calls, wholes = [], []
        for _ in range(args.times):
            begin = time.perf_counter()
            handle = hvd.allreduce_async(torch.ones(64), name=name, process_set=members)
            calls.append(1e3 * (time.perf_counter() - begin))
            while not hvd.poll(handle):
                time.sleep(1e-4)
            hvd.synchronize(handle)
            wholes.append(1e3 * (time.perf_counter() - begin))
        found = [statistics.median(calls), max(calls), statistics.median(wholes)]
        if hvd.rank() == 0:
            print(args.kind, name, "call {:.2f} ms, longest {:.2f}; allreduce {:.1f} ms".format(*found), flush=True)
    hvd.barrier()
    hvd.shutdown()


if __name__ == "__main__":
    main()
