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

pytestmark = [pytest.mark.e2e_cluster, pytest.mark.timeout(600, func_only=True)]

FAILOVER_S = 90.0
"""It takes 15 to 17 s, on a busy machine more; test_election.py of the unit tests has the promised times."""


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
    made = -1.0
    while made != (made := leader.changes()):
        pass  # it has something left to tell
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
    bench.kube.wait_for("its word that it waits", lambda: not leader.works())
    bench.kube.wait_for("its watches", lambda: leader.status("/livez") == 200)
    time.sleep(5.0)
    assert leader.changes() == made, "it has written although another leads"


@promise("S-246")
def test_a_leader_that_ends_in_order_is_followed_at_once(replicas: tuple[Bench, dict[str, Controller]]) -> None:
    """It leaves the Lease to nobody, and nobody's is taken without waiting for its term (test_election.py)."""
    bench, both = replicas
    leader, other = _leader(bench, both)

    def holder() -> str:
        lease = bench.kube.get("lease", "datastore-controller", namespace=SYSTEM)
        assert lease is not None
        return str(lease["spec"].get("holderIdentity", ""))

    os.kill(other.pid, signal.SIGSTOP)
    try:
        assert holder() in both
        os.kill(leader.pid, signal.SIGTERM)
        bench.kube.wait_for("a Lease of nobody", lambda: holder() == "")
    finally:
        os.kill(other.pid, signal.SIGCONT)
    print(f"hand-over: {bench.kube.wait_for('the other at work', other.works):.1f} s")
    bench.apply("next", bench.spec("n/"))
    bench.ready("next")


@promise("S-247")
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
        assert (deaf.status("/livez"), deaf.status("/readyz")) == (200, 503)

        def says_so() -> bool:
            assert not deaf.works()
            return deaf.status("/livez") == 503

        print(f"a dead watch is noticed after {fresh.wait_for('a word', says_so):.0f} s")
