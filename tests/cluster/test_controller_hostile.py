"""All hostile servers at once beside a tenant who just wants his Datastores, on an API server of their own."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.cluster.controlled import ROOT, Bench, account_kubeconfig, condition, controller, datastore_of, secret_of
from tests.cluster.kube import Kube, Manifest
from tests.hostile.servers import ATTACKS, Hostile, hostile
from tests.promises import promise
from tests.servers import Server

pytestmark = [pytest.mark.e2e_cluster, pytest.mark.timeout(600, func_only=True)]
SILENT = 120
"""Datastores of one tenant on a server that never answers."""
OURS = 20
READY_S = 30.0
MEMORY_MIB = 250
LARGE = "x" * (64 << 10)
"""As much as a value of a Secret may have."""


@promise("S-210")
def test_all_hostile_servers_at_once(fresh: Kube, s3_server: Server, tmp_path: Path) -> None:
    """Another tenant's Datastores are Ready in their time, and the controller stays small."""
    fresh.apply_folder(ROOT / "manifests")
    for name in ("hostile", "silent", "team"):
        fresh.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
        fresh.apply(secret_of(s3_server), namespace=name)
    fresh.apply(secret_of(s3_server, "large", one=LARGE, two=LARGE, three=LARGE), namespace="hostile")
    bench = Bench(fresh, s3_server, "team")
    with ExitStack() as stack:
        servers = {name: stack.enter_context(hostile(attack)) for name, attack in ATTACKS.items()}
        many = [_on(servers["silent"], f"d{number}", "keys") for number in range(SILENT)]
        theirs = [_on(server, name, "large") for name, server in servers.items()]
        account = account_kubeconfig(fresh.kubeconfig, fresh, tmp_path)
        running = stack.enter_context(controller(account, tmp_path, "--check", "5s"))
        fresh.apply(*many, namespace="silent")
        fresh.apply(*theirs, namespace="hostile")

        def looked_at() -> bool:
            found = fresh.items("datastores", namespace="hostile")
            return all(condition(each, "Ready") for each in found)

        began = time.monotonic()
        fresh.wait_for("a look at each hostile server", looked_at, limit_s=240, namespace="hostile")
        looked_s = time.monotonic() - began
        began = time.monotonic()
        fresh.apply(*[datastore_of(f"d{n}", bench.spec(f"{n}/")) for n in range(OURS)], namespace="team")

        def ready() -> bool:
            found = fresh.items("datastores", namespace="team")
            return sum(condition(each, "Ready").get("status") == "True" for each in found) == OURS

        fresh.wait_for("ours Ready", ready, limit_s=120, namespace="team")
        ready_s = time.monotonic() - began
        asked = {name: len(server.heads) for name, server in servers.items()}
        time.sleep(max(0.0, 20.0 - ready_s))  # they go on
        print(f"looks at all after {looked_s:.1f} s; requests: {asked}")
        print(f"{OURS} Datastores Ready after {ready_s:.1f} s, {running.peak_mib():.0f} MiB")
        assert all(asked.values())
        assert ready_s <= READY_S
        assert running.peak_mib() <= MEMORY_MIB
        assert running.status("/livez") == 200
        assert "a bug in the controller" not in str(fresh.items("datastores", namespace="hostile"))


def _on(server: Hostile, name: str, secret: str) -> Manifest:
    s3 = {"bucket": "bucket", "endpoint": server.endpoint, "credentialsSecret": secret}
    return datastore_of(name, {"s3": s3, "reclaimPolicy": "Delete"})
