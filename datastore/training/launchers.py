"""Which launcher has a job, for the command and for notebooks: this machine's, or the cluster of kubectl's context."""

from __future__ import annotations

import os
from collections.abc import Mapping

from datastore.api.datastore import DEFAULT_NAMESPACE
from datastore.errors import DatastoreError
from datastore.kubeclient import of_context
from datastore.training.cluster.driver import KubernetesDriver
from datastore.training.local.driver import LocalDriver
from datastore.training.local.records import directory_of

Launcher = LocalDriver | KubernetesDriver


def of_cluster(environment: Mapping[str, str] = os.environ) -> KubernetesDriver:
    """The cluster of kubectl's context, with its namespace. Errors: DatastoreError when none is configured."""
    return KubernetesDriver(of_context(environment))


def existing(name: str, namespace: str = "") -> tuple[Launcher, str]:
    """Where this job is, and its namespace: on this machine, or else in the cluster, if one is configured.

    namespace '': DEFAULT_NAMESPACE on this machine, and that of kubectl's context in a cluster.
    """
    if directory_of(name, namespace or DEFAULT_NAMESPACE).job_file.exists():
        return LocalDriver(), namespace or DEFAULT_NAMESPACE
    try:
        cluster = of_cluster()
    except DatastoreError:
        return LocalDriver(), namespace or DEFAULT_NAMESPACE
    return cluster, namespace or cluster.client.namespace
