#!/usr/bin/env bash
# The CMake command of Horovod's build (HOROVOD_CMAKE): drops VERBOSE=1, which make understands but ninja does not, and
# starts a compiler for each core in place of eight.
arguments=()
for argument in "$@"; do
  case $argument in
    VERBOSE=1) ;;
    -j8) arguments+=("-j$(nproc)") ;;
    *) arguments+=("$argument") ;;
  esac
done
exec cmake "${arguments[@]}"
