#!/usr/bin/env bash
# What a container of the image starts with: it takes the cluster's ssh key, then serves ssh (`worker`) or runs a command.
#
# One key pair makes a cluster. It is what a container proves itself with in both directions, as a client and as a
# server, so that no container takes a stranger for one of its own; and whoever holds it can run commands on all of
# them, so it is mounted (at /run/secrets/cluster_key, or where CLUSTER_KEY says) and not built into the image.
# Without one, a key is made that no other container knows, which is enough for one machine.
set -euo pipefail

say() { echo "container: $*" >&2; }

mounted=${CLUSTER_KEY:-/run/secrets/cluster_key}
home=$HOME/.ssh
key=$home/cluster_key
umask 077
mkdir -p "$home"
if [ -e "$mounted" ]; then
    if [ ! -r "$mounted" ]; then
        say "$mounted is there, but user $(id -un) (uid $(id -u)) may not read it: give it that owner, or mode 0444"
        exit 1
    fi
    cat "$mounted" >"$key"
elif [ ! -e "$key" ]; then
    say "no cluster key at $mounted: made one that this container alone knows, so other machines cannot be reached"
    ssh-keygen -q -t ed25519 -N '' -f "$key"
fi
public=$(ssh-keygen -y -f "$key" </dev/null)
echo "$public" >"$home/authorized_keys"
echo "* $public" >"$home/known_hosts"

if [ "${1:-}" = worker ]; then
    exec /usr/sbin/sshd -D -e -f /opt/hvd_gradcomp/scripts/container/sshd.conf -h "$key"
fi
exec "$@"
