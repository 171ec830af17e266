#!/bin/sh
# Run a command line on a host of the lab, as ssh would: agent.sh ADDRESS COMMAND LINE
# The host is the network namespace that hosts.py made for that address; it gets a host name of its own, by which
# Open MPI tells hosts apart.
address=$1
shift
exec ip netns exec "gclab${address##*.}" unshare --uts sh -c "hostname $address; $*"
