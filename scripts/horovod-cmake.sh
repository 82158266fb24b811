#!/usr/bin/env bash
# The CMake command of Horovod's build (HOROVOD_CMAKE): drops VERBOSE=1, which make understands but ninja does not.
arguments=()
for argument in "$@"; do
  [[ $argument == VERBOSE=1 ]] || arguments+=("$argument")
done
exec cmake "${arguments[@]}"
