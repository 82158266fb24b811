"""Runs scripts with --help, one after the other, each in a fork of this process, which has imported torch for all of
them: help_of_all.py SCRIPT... Prints "PATH ended with STATUS" after each one's own output."""

import os
import runpy
import sys

import hvd_compress  # noqa: F401

for path in sys.argv[1:]:
    if os.fork() == 0:
        sys.argv, sys.path[0] = [path, "--help"], os.path.dirname(path)
        runpy.run_path(path, run_name="__main__")
        sys.exit("did not parse its options")
    print(f"{path} ended with {os.waitstatus_to_exitcode(os.wait()[1])}", flush=True)
