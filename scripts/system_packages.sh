#!/usr/bin/env bash
# Install what a Debian or Ubuntu machine needs to build and run Horovod: compiler, Open MPI, ssh client, Python.
# Needs root or sudo without a password; without either it says what is missing and leaves the rest to the Gloo-only
# build. What this script does not do: anything inside the virtual environment (scripts/environment.sh does).
set -euo pipefail

say() { echo "system_packages: $*"; }

missing=()
need() { # need PACKAGE COMMAND...: the package is missing unless each command is there
    local package=$1 command
    shift
    for command in "$@"; do
        if ! command -v "$command" >/dev/null; then
            missing+=("$package")
            return
        fi
    done
}

need make make
need g++ g++ c++
need openmpi-bin mpirun
need libopenmpi-dev mpicxx
need openssh-client ssh

python=${PYTHON:-$(command -v python3.11 || command -v python3 || true)}
if [ -z "$python" ]; then
    missing+=(python3 python3-venv python3-dev)
else
    # A Python from the distribution comes in parts; one built from source has them all.
    version=$("$python" -c 'import sys; print("python%d.%d" % sys.version_info[:2])')
    "$python" -c 'import ensurepip, venv' 2>/dev/null || missing+=("$version-venv")
    header=$("$python" -c 'import sysconfig; print(sysconfig.get_path("include") + "/Python.h")')
    [ -e "$header" ] || missing+=("$version-dev")
fi

if [ ${#missing[@]} -eq 0 ]; then
    exit 0
fi

as_root=()
if [ "$(id -u)" -ne 0 ]; then
    as_root=(sudo -n)
fi
if ! command -v apt-get >/dev/null; then
    say "this is neither Debian nor Ubuntu; please install what corresponds to: ${missing[*]}"
elif [ ${#as_root[@]} -gt 0 ] && ! sudo -n true 2>/dev/null; then
    say "neither root nor sudo without a password here; missing: ${missing[*]}"
    say "an administrator installs them with: apt-get install ${missing[*]}"
else
    say "installing ${missing[*]}"
    apt=("${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=300 -qq)
    # A third party's repository may be out of reach; only the installation decides.
    "${apt[@]}" update || say "apt-get update complained; going on"
    "${apt[@]}" install -y --no-install-recommends "${missing[@]}" >/dev/null
    exit 0
fi

# Open MPI and ssh can be done without: Horovod then runs over Gloo on this machine. The others cannot.
for package in "${missing[@]}"; do
    case $package in
        openmpi-bin | libopenmpi-dev | openssh-client) ;;
        *)
            say "cannot go on without $package"
            exit 1
            ;;
    esac
done
