"""Finds the launcher that has a job, for the command and for notebooks: this machine's, or that of a cluster."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

from datastore.api.datastore import DEFAULT_NAMESPACE
from datastore.errors import DatastoreError
from datastore.kubeclient import of_context
from datastore.training.cluster.driver import KubernetesDriver
from datastore.training.local.driver import LocalDriver
from datastore.training.local.records import directory_of

log = logging.getLogger(__name__)

Launcher = LocalDriver | KubernetesDriver


def of_cluster() -> KubernetesDriver:
    """Return the driver for the cluster and namespace of kubectl's context. Errors: DatastoreError without one."""
    return KubernetesDriver(of_context(os.environ))


def existing(name: str, namespace: str = "", say: Callable[[str], None] = log.warning) -> tuple[Launcher, str]:
    """Return the launcher of a job and the job's namespace: the launcher of this machine if the job is here or no
    cluster is configured, else that of the cluster. namespace '': DEFAULT_NAMESPACE on this machine, and the namespace
    of kubectl's context in a cluster. say: see LocalDriver and KubernetesDriver."""
    if directory_of(name, namespace or DEFAULT_NAMESPACE).job_file.exists():
        return LocalDriver(say=say), namespace or DEFAULT_NAMESPACE
    try:
        cluster = KubernetesDriver(of_context(os.environ), say)
    except DatastoreError:
        return LocalDriver(say=say), namespace or DEFAULT_NAMESPACE
    return cluster, namespace or cluster.client.namespace
