#!/usr/bin/env bash
# Build the Dockerfile without a Docker engine and use the image: train on two workers, and reach a worker over ssh.
# For root on Debian or Ubuntu; takes about ten minutes and 15 GB in WORK, of which nothing stays (KEEP=1 leaves it).
#
# The base image is made here by debootstrap. pip inside the build gets this machine's pip settings (indexes, caches,
# certificates) for the time of the build only, as mounted files; the image itself has none of them.
# What this script does not test: CUDA, and containers on several machines.
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
if ! command -v buildah >/dev/null || ! command -v debootstrap >/dev/null; then
    say "installing buildah and debootstrap"
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends buildah debootstrap >/dev/null
fi

mkdir -p "$work"
export BUILDAH_ISOLATION=chroot
buildah() { command buildah --root "$work/storage" --runroot "$work/run" --storage-driver vfs "$@"; }
clean_up() {
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

container=$(buildah from "$image")
run() { buildah run "$container" -- /opt/hvd_gradcomp/scripts/container/entry.sh "$@"; }

say "size: $(du -sh "$(buildah mount "$container")" | cut -f1)"
say "who runs: $(run id)"
say "horovodrun --check-build:"
run horovodrun --check-build

say "training on two workers"
run horovodrun -np 2 python examples/train.py --epochs 1

# A second address of this machine, which the launchers take for another host, so that they go there over ssh.
say "ssh to a worker, and training over it"
buildah run "$container" -- bash -euo pipefail -c '
    entry=/opt/hvd_gradcomp/scripts/container/entry.sh
    $entry worker &
    server=$!
    trap "kill $server" EXIT
    for attempt in $(seq 50); do
        ssh 127.0.0.2 true 2>/dev/null && break
        sleep 0.2
    done
    echo "over ssh: $(ssh 127.0.0.2 "id -un; command -v python horovodrun orted" | xargs)"
    if ssh -i /dev/null -o IdentityAgent=none -o IdentityFile=/dev/null 127.0.0.2 true 2>/dev/null; then
        echo "the server let somebody in without the key" && exit 1
    fi
    echo "over ssh, mpirun: $(mpirun -np 2 -H localhost:1,127.0.0.2:1 -bind-to none hostname | xargs)"
    echo "over ssh, horovodrun --gloo:"
    horovodrun --gloo -np 2 -H localhost:1,127.0.0.2:1 --network-interfaces lo python examples/train.py --epochs 1
'
say "passed"
