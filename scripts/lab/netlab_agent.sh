#!/usr/bin/env bash
# Runs a command on a host of netlab.sh, under that host's name:  netlab_agent.sh HOST COMMAND...
# mpirun calls it as its remote shell: like ssh, it joins the arguments and passes them to a shell on the host.
host=$1
shift
exec ip netns exec "$host" unshare --uts bash -c "hostname $host; $*"
