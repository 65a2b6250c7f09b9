# One image for the controller, the CSI node plugin and the mount servers. `make image` builds it without a registry.
ARG BASE=python:3.11-slim

FROM ${BASE} AS dependencies
COPY .ci/requirements-image.lock /tmp/
RUN python3 -m venv /opt/datastore \
 && /opt/datastore/bin/pip install --no-cache-dir --require-hashes --requirement /tmp/requirements-image.lock

FROM dependencies AS project
WORKDIR /src
COPY pyproject.toml README.md ./
COPY datastore datastore
COPY fuse fuse
COPY csi csi
COPY manifests manifests
# Below a root of its own, so that a change of the code is a small layer above the dependencies.
RUN /opt/datastore/bin/pip install --no-cache-dir --no-deps --no-build-isolation --root /project .

FROM dependencies AS stripped
# What installs is of no use in a running container.
RUN /opt/datastore/bin/pip uninstall --yes --quiet setuptools pip

FROM ${BASE}
# NFS exports are mounted over libnfs where a node's kernel has no NFS client, GlusterFS volumes by their own client.
# Schedules of TrainingJobs need the time zones.
RUN apt-get update --quiet=2 \
 && apt-get install --quiet=2 --yes --no-install-recommends '^libnfs1[34]$' glusterfs-client tzdata \
 && rm -rf /var/lib/apt/lists/*
ENV PATH=/opt/datastore/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
# Nobody in particular. Only the node plugin's pod asks for root: it mounts.
USER 65532:65532
ENTRYPOINT ["datastore"]
COPY --from=stripped /opt/datastore /opt/datastore
COPY --from=project /project/opt/datastore /opt/datastore
