"""What must hold for every method on real ranks. Run by tests/parallel/test_*.py:

scripts/run.sh [--gloo | --ddp] NP check_training.py [--host ddp | --host fsdp] [--steps N] [--nodes N]
    METHOD[:CASE,CASE...] ...

METHOD is one of tests/methods.py; without cases, all that apply are run. Every rank reports the begin and the end of
each case on stdout and in $HVD_COMPRESS_TEST_LOGS/rank-N.log, with errors and, if a case hangs, its stack. A failed or
hanging case ends the job.
"""

import argparse
import faulthandler
import gc
import importlib
import os
import sys
import tempfile
import time
import traceback
from pathlib import Path

arguments = argparse.ArgumentParser()
arguments.add_argument("--host", choices=["horovod", "ddp", "fsdp"], default="horovod")
arguments.add_argument("--steps", type=int, default=40)
arguments.add_argument("--nodes", type=int, default=0)
arguments.add_argument("--case-limit", type=float, default=240.0, help="seconds after which a case counts as hanging")
arguments.add_argument("plan", nargs="+", metavar="METHOD[:CASE,CASE...]")


def main() -> None:
    chosen = arguments.parse_args()
    tests = Path(__file__).resolve().parents[1]
    sys.path[:0] = [str(tests), str(tests / "faults")]
    if chosen.host != "horovod":
        sys.modules["horovod"] = None  # type: ignore[assignment]  # importing it fails
    gc.disable()  # while nothing but modules is made: a tenth of the time of imports
    import job
    import torch
    import torch._dynamo  # takes seconds, which are not part of the first case; optimizers need it
    from cases import names_of

    torch.set_num_threads(1)
    host = job.host = importlib.import_module(f"{chosen.host}_job")
    job.steps, job.nodes = chosen.steps, chosen.nodes
    names = ["common_cases", f"{chosen.host}_cases", f"{chosen.host}_script_cases", "mismatch_cases", "script_cases"]
    if chosen.host == "horovod":
        names.append("optimizer_cases")
    if chosen.host == "fsdp":  # its modules run in the same order on all ranks, unlike those of the common cases
        names = ["fsdp_cases"]
    modules = list(map(importlib.import_module, names))
    cases = {name: case for module in modules for name, case in module.CASES.items()}
    assert len(cases) == sum(len(module.CASES) for module in modules), "two cases of one name"
    host.start()
    assert host.size() > 1
    gc.collect()
    gc.enable()
    gc.freeze()  # the compressor collects garbage where several live: it need not look at modules each time
    dropped = job.exchanges_dropped()
    folder = Path(os.environ.get("HVD_COMPRESS_TEST_LOGS") or tempfile.mkdtemp())
    with open(folder / f"rank-{host.rank()}.log", "w") as log:

        def say(text: str) -> None:
            print(text, file=log, flush=True)
            sys.stdout.write(f"[rank {host.rank()}] {text}\n")  # one write, so that ranks do not mix lines
            sys.stdout.flush()

        for item in chosen.plan:
            job.method, _, names = item.partition(":")
            for name in names.split(",") if names else names_of(cases, job.method):
                say(f"begin {job.method} {name}")
                faulthandler.dump_traceback_later(chosen.case_limit, exit=True, file=log)
                begin = time.perf_counter()
                try:
                    cases[name].run()
                    gc.collect()
                    assert not dropped, f"dropped while an exchange was in progress: {dropped}"
                except BaseException:
                    say(f"failed {job.method} {name}\n{traceback.format_exc()}")
                    os._exit(1)  # other ranks may wait for this one: the launcher ends them
                say(f"ok {job.method} {name} ({time.perf_counter() - begin:.1f} s)")
        faulthandler.cancel_dump_traceback_later()
        host.stop()


if __name__ == "__main__":
    main()
