"""Several replicas, and a thousand Datastores."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.cluster.controlled import PEERS, READY_S, Bench, Controller, condition, controller, datastore_of

pytestmark = [pytest.mark.e2e_cluster, pytest.mark.timeout(300, func_only=True)]


def test_the_replica_with_the_higher_priority_works_and_the_other_waits(
    bench: Bench, running: Controller, account: Path, tmp_path: Path
) -> None:
    bench.apply("first", bench.spec("a/"))
    bench.ready("first")
    with controller(account, tmp_path, *PEERS, "--priority", "2", name="high") as high:
        bench.kube.wait_for("the higher one at work", high.works, limit_s=READY_S)
        bench.kube.wait_for("the lower one in waiting", lambda: not running.works(), limit_s=READY_S)
        assert running.status("/livez") == running.status("/readyz") == 200
        bench.apply("second", bench.spec("b/"))
        bench.ready("second")
    bench.kube.wait_for("the lower one at work", running.works, limit_s=READY_S)
    bench.apply("third", bench.spec("c/"))
    bench.ready("third")


CROWD = 1000


@pytest.mark.timeout(900, func_only=True)
def test_a_thousand_datastores(bench: Bench, account: Path, tmp_path: Path) -> None:
    """Applied at once: Ready within 120 s, at most 250 MiB; deleted: nothing is left."""
    with controller(account, tmp_path, *PEERS, "--priority", "2", name="crowd") as working:
        bench.kube.wait_for("the controller at work", working.works, limit_s=READY_S)
        _crowd(bench, working)


def _crowd(bench: Bench, running: Controller) -> None:
    spec = bench.spec(reclaimPolicy="Delete")
    many = [
        datastore_of(f"d{number}", {**spec, "s3": {**spec["s3"], "prefix": f"{number}/", "create": True}})
        for number in range(CROWD)
    ]
    before = {each["metadata"]["name"] for each in bench.kube.items("pv")}
    started = time.monotonic()
    bench.kube.apply(*many, namespace=bench.space)
    applied_s = time.monotonic() - started

    def ready() -> bool:
        found = bench.kube.items("datastores", namespace=bench.space)
        return sum(condition(each, "Ready").get("status") == "True" for each in found) == CROWD

    bench.kube.wait_for("all Ready", ready, limit_s=400)
    ready_s = time.monotonic() - started
    started = time.monotonic()
    bench.kube.kubectl("delete", "datastores", "--all", "--wait=false", "--namespace", bench.space, timeout_s=300)
    bench.kube.wait_for("all gone", lambda: not bench.kube.items("datastores", namespace=bench.space), limit_s=400)
    gone_s = time.monotonic() - started
    print(f"applied {applied_s:.0f} s, Ready {ready_s:.0f} s, gone {gone_s:.0f} s, {running.peak_mib():.0f} MiB")
    assert bench.objects() == []
    assert bench.kube.items("pvc", namespace=bench.space) == []
    assert {each["metadata"]["name"] for each in bench.kube.items("pv")} <= before
    assert running.peak_mib() <= 250
    assert ready_s <= 120
