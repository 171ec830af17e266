# An image with Horovod, this package and its examples, and ssh between the containers of a cluster.
#
# For CPUs (Debian 12, the default):
#     docker build -t hvd_gradcomp .
# For NVIDIA GPUs with NCCL (any base with CUDA, NCCL's headers and Python 3.11 to 3.13, such as Ubuntu 24.04's):
#     docker build -t hvd_gradcomp:cuda --build-arg BASE=nvidia/cuda:12.9.1-cudnn-devel-ubuntu24.04 \
#         --build-arg HOROVOD_GPU_OPERATIONS=NCCL .
#     TORCH and PIP_EXTRA_INDEX_URL choose another wheel of torch, for the CUDA of the base:
#         --build-arg TORCH=torch==2.13.0+cu129 --build-arg PIP_EXTRA_INDEX_URL=<PyTorch's index for cu129>
# Without TensorFlow, 1.3 GB smaller:
#     --build-arg EXTRAS=torch,examples
#
# On one machine:
#     docker run --rm hvd_gradcomp horovodrun -np 2 python examples/train.py
# On several, one container each, on a network on which they find each other by name. The containers of a cluster share
# one ssh key, which is made for the cluster and mounted, never part of the image (whoever has an image has its keys):
#     ssh-keygen -t ed25519 -N '' -f cluster_key    # readable by the user with the UID below
#     docker run -d --name host1 --network net -v $PWD/cluster_key:/run/secrets/cluster_key:ro hvd_gradcomp
#     docker run -d --name host2 --network net -v $PWD/cluster_key:/run/secrets/cluster_key:ro hvd_gradcomp
#     docker exec host1 horovodrun -np 4 -H host1:2,host2:2 python examples/train.py
# mpirun takes the same list of hosts. What scripts/container/entry.sh does with the key is written there.

ARG BASE=debian:bookworm

FROM ${BASE} AS build
ARG HOROVOD_GPU_OPERATIONS=
ARG TORCH=
ARG PIP_EXTRA_INDEX_URL=
ARG EXTRAS=torch,tensorflow,examples
WORKDIR /opt/hvd_gradcomp
# Before the package's own code, so that a change of that does not build Horovod again.
COPY constraints.txt pyproject.toml setup.cfg ./
COPY scripts scripts
# An empty variable is not an unset one: to Horovod and pip, options that were not given must not be there at all.
RUN set -eu; \
    for name in HOROVOD_GPU_OPERATIONS TORCH PIP_EXTRA_INDEX_URL; do \
        eval "[ -n \"\$$name\" ] || unset $name"; \
    done; \
    apt-get update -qq; \
    PIP_NO_CACHE_DIR=1 EXTRAS="$EXTRAS" scripts/environment.sh; \
    .venv/bin/pip uninstall -q -y cmake ninja
COPY setup.py MANIFEST.in ./
COPY hvd_gradcomp hvd_gradcomp
# Once more, now that there are native kernels to compile.
RUN .venv/bin/pip install --quiet --no-build-isolation --no-deps -e .
COPY examples examples

FROM ${BASE}
ARG UID=1000
RUN apt-get update -qq \
    && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends \
        openmpi-bin openssh-client openssh-server python3 >/dev/null \
    # Keys made here would be the same in every container of this image.
    && rm -rf /etc/ssh/ssh_host_* /var/lib/apt/lists/* \
    && mkdir -p /run/sshd \
    # Some bases come with a user of the same number.
    && (getent passwd "$UID" >/dev/null && userdel "$(getent passwd "$UID" | cut -d: -f1)" || true) \
    && useradd --uid "$UID" --create-home --shell /bin/bash --password '*' worker
COPY --from=build /opt/hvd_gradcomp /opt/hvd_gradcomp
COPY --chown=worker examples /home/worker/examples
COPY scripts/container/ssh.conf /etc/ssh/ssh_config.d/hvd_gradcomp.conf

ENV PATH=/opt/hvd_gradcomp/.venv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    PYTHONDONTWRITEBYTECODE=1 \
    # A container may not look into the memory of another process, which Open MPI would try.
    OMPI_MCA_btl_vader_single_copy_mechanism=none
USER worker
WORKDIR /home/worker
EXPOSE 2222
ENTRYPOINT ["/opt/hvd_gradcomp/scripts/container/entry.sh"]
CMD ["worker"]
