"""The cluster tier's fixtures; what needs the node is left out on a cluster that is not this machine's."""

from __future__ import annotations

import pytest

from tests.cluster.controlled import account, api_kube, bench, ending_spaces, fresh, running, s3_server, space
from tests.cluster.fixtures import (
    api_server,
    ending_namespaces,
    kube,
    models_controller,
    namespace,
    own_site,
    product,
    site,
    storage,
    train_image,
)
from tests.cluster.managednfs import disk, managed

__all__ = [
    "account",
    "api_kube",
    "api_server",
    "bench",
    "disk",
    "ending_namespaces",
    "ending_spaces",
    "fresh",
    "kube",
    "managed",
    "models_controller",
    "namespace",
    "product",
    "running",
    "s3_server",
    "site",
    "space",
    "storage",
    "train_image",
]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect `own_node` tests on a user's cluster; the chart comes and goes before kustomize installs the same."""
    items.sort(key=lambda item: item.path.name != "test_helm.py")
    if own_site():
        return
    left_out = [item for item in items if item.get_closest_marker("own_node")]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]
