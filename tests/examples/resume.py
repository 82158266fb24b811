"""Runs examples, each four times, in this rank: resume.py FOLDER STEPS SCRIPT...

All STEPS at once; half of them; the other half, from the checkpoint; again, with no step left. Started by
test_examples.py on every rank."""

import os
import runpy
import sys

from torch import distributed

folder, steps, *scripts = sys.argv[1:]
sys.path[0] = os.path.dirname(scripts[0])  # as if it had been started
if "TORCHELASTIC_RUN_ID" in os.environ:
    # One process group for all runs: a second one would find the first one's addresses in torchrun's store.
    distributed.init_process_group("gloo")
    distributed.init_process_group = distributed.destroy_process_group = lambda *_, **__: None
RUNS = ((steps, "whole"), (str(int(steps) // 2), "resumed"), (steps, "resumed"), (steps, "resumed"))
for script in scripts:
    for count, checkpoints in RUNS:
        sys.argv = [script, "--steps", count, "--checkpoints", f"{folder}/{os.path.basename(script)}/{checkpoints}"]
        runpy.run_path(script, run_name="__main__")
        if distributed.is_initialized():
            distributed.barrier()  # the next run reads what another rank may still be writing
