"""After the other modules of the controller, which have made every kind of call: the rules are those calls."""

from __future__ import annotations

import pytest

from tests.cluster.controlled import (
    ROOT,
    Controller,
    granted,
)
from tests.cluster.kube import Kube

pytestmark = [pytest.mark.e2e_cluster, pytest.mark.timeout(300, func_only=True)]


RARE = {
    ("datastores", "get"),
    ("namespaces", "get"),
    ("persistentvolumes", "get"),
    ("nodes", "list"),
    ("nodes", "watch"),
}
"""Made only when a finalizer was taken off by hand, a removal has failed for a minute, a watch was missed for 10 s, or
a StorageClass of NFS asks for the nodes (tests/nfs/test_own_exports.py)."""


def test_the_rules_of_the_role_are_the_calls_made(running: Controller) -> None:
    """Last but for the crowd: the tests above have made every kind of call, with these rights and no others."""
    base = ROOT / "manifests" / "base"
    allowed = granted(base / "controller-rbac.yaml") | granted(base / "rotation.yaml")
    watched = {"datastores", "persistentvolumes", "persistentvolumeclaims", "storageclasses", "leases"}
    made = running.calls() | {(each, verb) for each in watched for verb in ("list", "watch")}
    # Server-side apply of something new is authorised as create, too.
    made |= {(each, "create") for each in ("persistentvolumes", "persistentvolumeclaims")}
    assert sorted(made - allowed) == []
    assert sorted(allowed - made - RARE) == []


def test_the_watch_is_proven_alive(api_kube: Kube, running: Controller) -> None:
    assert running.status("/livez") == 200
    assert running.status("/readyz") == 200
    api_kube.wait_for("its turn to work", running.works)
