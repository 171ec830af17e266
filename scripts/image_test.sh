#!/usr/bin/env bash
# Build the Dockerfile without a Docker engine and use the image: train on two workers in one container, then in two
# containers that reach each other over ssh, as on two machines.
# For root on Debian or Ubuntu; takes about ten minutes and 15 GB in WORK, of which nothing stays (KEEP=1 leaves it).
#
# The base image is made here by debootstrap. pip inside the build gets this machine's pip settings (indexes, caches,
# certificates) for the time of the build only, as mounted files; the image itself has none of them.
# What this script does not test: CUDA.
set -euo pipefail
cd "$(dirname "$0")/.."

work=${WORK:-/var/tmp/hvd_gradcomp-image-test}
release=bookworm
image=localhost/hvd_gradcomp
say() { echo "image_test: $*"; }

if [ "$(id -u)" -ne 0 ]; then
    say "needs root: debootstrap and buildah's chroot isolation do"
    exit 1
fi
if ! command -v buildah >/dev/null || ! command -v debootstrap >/dev/null || ! command -v ip >/dev/null; then
    say "installing buildah, debootstrap and iproute2"
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends buildah debootstrap iproute2 >/dev/null
fi

mkdir -p "$work"
export BUILDAH_ISOLATION=chroot
storage=(--root "$work/storage" --runroot "$work/run" --storage-driver vfs)
buildah() { command buildah "${storage[@]}" "$@"; }
namespace() { echo "hvd-image-test-$1"; }
clean_up() {
    for host in 1 2; do
        ip netns pids "$(namespace $host)" 2>/dev/null | xargs -r kill || true
        ip netns del "$(namespace $host)" 2>/dev/null || true
    done
    buildah rm --all >/dev/null 2>&1 || true
    if [ "${KEEP:-0}" = 1 ]; then
        say "kept: $work"
    else
        rm -rf "$work"
    fi
}
trap clean_up EXIT

if ! buildah inspect --type image localhost/base >/dev/null 2>&1; then
    say "making a base image of Debian $release"
    rm -rf "$work/rootfs"
    debootstrap --variant=minbase "$release" "$work/rootfs" >"$work/debootstrap.log" || {
        tail "$work/debootstrap.log"
        exit 1
    }
    rm -rf "$work/rootfs/var/cache/apt/archives" "$work/rootfs/var/lib/apt/lists"
    base=$(buildah from scratch)
    buildah add -q "$base" "$work/rootfs" / >/dev/null
    buildah commit -q "$base" localhost/base >/dev/null
    buildah rm "$base" >/dev/null
    rm -rf "$work/rootfs"
fi

# Volumes for the build alone, one a line: pip's settings and the files that they name, and Horovod's wheel cache.
python3 scripts/pip_volumes.py "$work/pip" >"$work/volumes"
cache=${XDG_CACHE_HOME:-$HOME/.cache}/hvd_gradcomp
mkdir -p "$cache"
echo "$cache:/root/.cache/hvd_gradcomp" >>"$work/volumes"
volumes=()
while read -r volume; do volumes+=(--volume "$volume"); done <"$work/volumes"

say "building the Dockerfile"
started=$SECONDS
buildah build "${volumes[@]}" --build-arg BASE=localhost/base -t "$image" .
say "built in $((SECONDS - started)) s"

# Two containers as on two machines: each in a network namespace of its own, joined by a cable, with the cluster's key.
say "starting host1 and host2"
for host in 1 2; do
    ip netns add "$(namespace $host)"
    ip -n "$(namespace $host)" link set lo up
done
ip link add eth0 netns "$(namespace 1)" type veth peer name eth0 netns "$(namespace 2)"
rm -f "$work"/cluster_key*
ssh-keygen -q -t ed25519 -N '' -f "$work/cluster_key"
chmod 444 "$work/cluster_key" # root's here, read by the container's user
containers=()
for host in 1 2; do
    ip -n "$(namespace $host)" addr add "10.77.7.$host/24" dev eth0
    ip -n "$(namespace $host)" link set eth0 up
    containers[host]=$(buildah from --add-host host1:10.77.7.1 --add-host host2:10.77.7.2 "$image")
done

on() { # on HOST COMMAND...: run it in that host's container, as its user, the way the image starts everything
    local host=$1
    shift
    ip netns exec "$(namespace "$host")" buildah "${storage[@]}" run --hostname "host$host" \
        --volume "$work/cluster_key:/run/secrets/cluster_key:ro" "${containers[host]}" -- \
        /opt/hvd_gradcomp/scripts/container/entry.sh "$@"
}

say "size: $(du -sh "$(buildah mount "${containers[1]}")" | cut -f1), user: $(on 1 id)"
say "Horovod over: $(on 1 python -c '
import horovod.torch as hvd
print({"MPI": bool(hvd.mpi_built()), "Gloo": bool(hvd.gloo_built()), "NCCL": bool(hvd.nccl_built())})')"

say "training on two workers in one container"
on 1 horovodrun -np 2 python examples/train.py --epochs 1

say "ssh from host1 to host2"
on 2 worker >"$work/host2.log" 2>&1 &
for _ in $(seq 20); do
    on 1 ssh host2 true 2>/dev/null && break
    sleep 1
done
say "over ssh: $(on 1 ssh host2 'hostname; id -un; command -v python horovodrun orted' | xargs)"
# shellcheck disable=SC2016 # for the shell in the container
on 1 bash -c '
    ssh-keygen -q -t ed25519 -N "" -f ~/.ssh/stranger
    ! ssh -F /dev/null -p 2222 -i ~/.ssh/stranger -o BatchMode=yes -o StrictHostKeyChecking=no \
        -o UserKnownHostsFile=/dev/null host2 true 2>/dev/null
' || {
    say "FAILED: host2 let somebody in who does not have the cluster's key"
    exit 1
}
say "a stranger's key was refused"
say "mpirun: $(on 1 mpirun -np 2 -H host1,host2 hostname 2>/dev/null | xargs)"
for launcher in mpi gloo; do
    say "training on host1 and host2 over $launcher"
    on 1 horovodrun "--$launcher" -np 2 -H host1:1,host2:1 python examples/train.py --epochs 1
done
say "passed"
