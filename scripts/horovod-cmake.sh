#!/usr/bin/env bash
# The CMake that Horovod's build calls (HOROVOD_CMAKE): CMake without the VERBOSE=1 that only make understands,
# so that ninja, which comes as a wheel, can build it on a machine without make.
arguments=()
for argument in "$@"; do
  [[ $argument == VERBOSE=1 ]] || arguments+=("$argument")
done
exec cmake "${arguments[@]}"
