"""Two replicas of the controller: one works, and the other takes over when that one is stopped, hangs or dies."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.cluster.controlled import (
    READY_S,
    ROOT,
    SYSTEM,
    Bench,
    Controller,
    account_kubeconfig,
    controller,
    secret_of,
)
from tests.cluster.kube import Kube
from tests.promises import promise
from tests.servers import Server

pytestmark = [pytest.mark.e2e_cluster, pytest.mark.timeout(300, func_only=True)]

FAILOVER_S = 20.0


@pytest.fixture
def replicas(fresh: Kube, s3_server: Server, tmp_path: Path) -> Iterator[tuple[Bench, dict[str, Controller]]]:
    """An API server of their own with two of them."""
    fresh.apply_folder(ROOT / "manifests")
    fresh.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "team"}})
    fresh.apply(secret_of(s3_server), namespace="team")
    account = account_kubeconfig(fresh.kubeconfig, fresh, tmp_path)
    with ExitStack() as stack:
        both = {name: stack.enter_context(controller(account, tmp_path, name=name)) for name in ("one", "two")}
        yield Bench(fresh, s3_server, "team"), both


def _leader(bench: Bench, both: dict[str, Controller]) -> tuple[Controller, Controller]:
    """Who leads, and who waits."""
    bench.kube.wait_for("a leader", lambda: any(each.works() for each in both.values()), limit_s=READY_S)
    first, second = both.values()
    return (first, second) if first.works() else (second, first)


@promise("S-246")
def test_a_leader_that_hangs_is_followed_and_does_nothing_when_it_goes_on(
    replicas: tuple[Bench, dict[str, Controller]],
) -> None:
    """With the default times; the paused leader has work to do when it wakes, and must leave it."""
    bench, both = replicas
    leader, other = _leader(bench, both)
    bench.apply("first", bench.spec("a/"))
    bench.ready("first")
    assert not other.works()
    assert (other.status("/livez"), other.status("/readyz"), other.changes()) == (200, 200, 0)
    made = leader.changes()
    os.kill(leader.pid, signal.SIGSTOP)
    try:
        stopped = time.monotonic()
        for number in range(5):
            bench.apply(f"edited-{number}", bench.spec(f"{number}/"))
        while not other.works():
            assert time.monotonic() < stopped + FAILOVER_S
            time.sleep(0.1)
        print(f"failover: {time.monotonic() - stopped:.1f} s")
        bench.ready("edited-4")
    finally:
        os.kill(leader.pid, signal.SIGCONT)
    for number in range(5):
        bench.apply(f"edited-{number}", bench.spec(f"{number}/", metadataTTL="5s"))
    time.sleep(5.0)
    assert not leader.works()
    assert leader.changes() == made, "it has written although another leads"
    assert leader.status("/livez") == 200


@promise("S-246")
def test_a_leader_that_ends_in_order_is_followed_at_once(replicas: tuple[Bench, dict[str, Controller]]) -> None:
    bench, both = replicas
    leader, other = _leader(bench, both)
    started = time.monotonic()
    os.kill(leader.pid, signal.SIGTERM)
    bench.kube.wait_for("the other at work", other.works, limit_s=10)
    print(f"hand-over: {time.monotonic() - started:.1f} s")
    bench.apply("next", bench.spec("n/"))
    bench.ready("next")


@promise("S-247")
@pytest.mark.timeout(120, func_only=True)
def test_a_controller_whose_watches_are_dead_says_so(fresh: Kube, tmp_path: Path) -> None:
    """Its requests are answered, and it would lead; but the API server shows it nothing."""
    fresh.apply_folder(ROOT / "manifests")
    metadata = {"name": "deaf", "namespace": SYSTEM}
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "datastore-controller"}
    subject = {"kind": "ServiceAccount", **metadata}
    api = "rbac.authorization.k8s.io/v1"
    fresh.apply(
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata},
        {"apiVersion": api, "kind": "RoleBinding", "metadata": metadata, "roleRef": role, "subjects": [subject]},
        namespace=SYSTEM,
    )
    account = account_kubeconfig(fresh.kubeconfig, fresh, tmp_path, "deaf")
    with controller(account, tmp_path, name="deaf", ready=False) as deaf:
        started = time.monotonic()
        assert (deaf.status("/livez"), deaf.status("/readyz")) == (200, 503)
        while deaf.status("/livez") == 200:
            assert time.monotonic() < started + 60
            time.sleep(0.5)
        print(f"a dead watch is noticed after {time.monotonic() - started:.0f} s")
        assert (deaf.status("/livez"), deaf.works()) == (503, False)
