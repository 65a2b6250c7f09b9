"""datastore.controller.datastores.claimprobe: one pod, once, bounded."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import pytest

from datastore.api.resources import Resource
from datastore.api.status import Capabilities
from datastore.backends.base import Measured
from datastore.controller.datastores.claimprobe import AGAIN_S, COMMAND, NOBODY, WAIT_S, ClaimProbe, Tried
from datastore.controller.datastores.effective import effective_spec
from datastore.controller.datastores.settings import Settings
from datastore.controller.runtime.client import ApiError, Client
from tests.promises import promise
from tests.unit.controller.datastores.test_effective import body

MEANT = effective_spec(body({"claim": {"name": "disk", "probe": True}}), None, Settings())
CLAIM = {"metadata": {"name": "disk"}, "spec": {"volumeName": "v-1"}, "status": {"phase": "Bound"}}
ANSWER = {"capabilities": {"rename": True, "hardlinks": True}, "objects": 2, "bytes": 7}


class Pods(Client):
    """A cluster of pods by name."""

    def __init__(self, *others: dict[str, Any], refusal: ApiError | None = None, only_root: bool = False) -> None:
        super().__init__()
        self.others, self.refusal, self.root_too = others, refusal, not only_root
        self.pods: dict[str, dict[str, Any]] = {}
        self.created = 0

    async def list(
        self, resource: Resource, namespace: str, field_selector: str = "", label_selector: str = ""
    ) -> list[dict[str, Any]]:
        if not field_selector.startswith("metadata.name="):
            return [*self.others, *self.pods.values()]
        found = self.pods.get(field_selector.removeprefix("metadata.name="))
        return [found] if found else []

    async def create(self, resource: Resource, namespace: str, body: Mapping[str, Any]) -> dict[str, Any]:
        if self.refusal and (self.root_too or body["spec"]["securityContext"]["runAsUser"] == 0):
            raise self.refusal
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        made = {**body, "metadata": {**body["metadata"], "uid": "p-1", "creationTimestamp": now}}
        self.pods[body["metadata"]["name"]] = made
        self.created += 1
        return made

    async def delete(self, resource: Resource, namespace: str, name: str, uid: str) -> dict[str, Any] | None:
        assert uid == "p-1"
        del self.pods[name]
        return None

    @property
    def pod(self) -> dict[str, Any]:
        (found,) = self.pods.values()
        return found

    def ended(self, message: str, phase: str = "Succeeded") -> None:
        self.pod["status"] = {"phase": phase, "containerStatuses": [{"state": {"terminated": {"message": message}}}]}


class World:
    def __init__(self, client: Pods, **settings: Any) -> None:
        self.now = 0.0
        allowed = {"probe_claims": True, "probe_image": "ours:1", **settings}
        self.client, self.probe = client, ClaimProbe(client, Settings(**allowed), lambda: self.now)

    def step(self, claim: dict[str, Any] | None = CLAIM, status: Mapping[str, Any] | None = None) -> Tried:
        return asyncio.run(self.probe.step(MEANT, claim, status or {}))


@promise("S-115")
def test_a_probe_pod_runs_once_and_is_removed() -> None:
    cluster = Pods()
    world = World(cluster)
    assert world.step().wait_s is not None
    spec = cluster.pod["spec"]
    assert (spec["containers"][0]["image"], spec["containers"][0]["command"]) == ("ours:1", list(COMMAND))
    assert cluster.pod["metadata"]["ownerReferences"][0]["uid"] == MEANT.uid
    assert world.step().wait_s is not None
    cluster.ended(json.dumps(ANSWER))
    found = world.step()
    assert found.capabilities == Capabilities.model_validate({"rename": True, "hardlinks": True})
    assert found.measured == Measured(objects=2, size_bytes=7)
    assert (cluster.pods, cluster.created) == ({}, 1)


@pytest.mark.parametrize(
    ("claim", "status"),
    [(None, {}), ({**CLAIM, "status": {"phase": "Pending"}}, {}), (CLAIM, {"capabilities": {"rename": True}})],
)
def test_an_unbound_or_already_probed_claim_is_not_probed(claim: Any, status: Any) -> None:
    cluster = Pods()
    assert World(cluster).step(claim, status) == Tried()
    assert cluster.created == 0


def test_the_probe_pod_runs_on_the_node_of_a_pod_that_uses_the_claim() -> None:
    """A volume of one node can't be mounted elsewhere."""
    volumes = [{"persistentVolumeClaim": {"claimName": "disk"}}]
    cluster = Pods({"metadata": {"name": "x"}, "spec": {"nodeName": "n-7", "volumes": volumes}})
    World(cluster).step()
    assert cluster.pod["spec"]["nodeName"] == "n-7"


@promise("S-115")
def test_no_probe_pod_is_made_unless_the_administrator_allows_it() -> None:
    cluster = Pods()
    world = World(cluster, probe_claims=False)
    event = world.step().event
    assert event is not None
    assert "--probe-claims" in event.message
    assert world.step() == Tried(), "told once"
    assert cluster.created == 0


@pytest.mark.parametrize(
    ("message", "complaint"),
    [
        (json.dumps({"error": "Permission denied (as uid 0)"}), "Permission denied"),
        ("no json", "without an answer"),
        (json.dumps({"capabilities": {"flies": True}}), "could not be read"),
    ],
)
def test_a_failed_probe_is_reported_and_retried_later(message: str, complaint: str) -> None:
    cluster = Pods()
    world = World(cluster)
    world.step()
    cluster.ended(message)
    event = world.step().event
    assert event is not None
    assert complaint in event.message
    assert cluster.pods == {}
    assert world.step() == Tried()
    world.now += AGAIN_S
    assert world.step().wait_s is not None


USED = [{"persistentVolumeClaim": {"claimName": "disk"}}]
AS_GROUP = {"runAsUser": 1000, "runAsGroup": 1000, "fsGroup": 2000, "supplementalGroups": [3000]}


@promise("S-135")
@pytest.mark.parametrize(
    ("user", "expected"),
    [
        ({}, {"runAsUser": NOBODY}),
        ({"containers": [{"securityContext": {"runAsUser": 1000}}]}, {"runAsUser": 1000}),
        ({"securityContext": AS_GROUP}, {**AS_GROUP, "fsGroupChangePolicy": "OnRootMismatch"}),
        ({"securityContext": {"runAsUser": 0}}, {"runAsUser": NOBODY}),
    ],
)
def test_where_root_is_refused_the_probe_runs_as_the_user_of_the_claims_pod(
    user: dict[str, Any], expected: dict[str, Any]
) -> None:
    other = {"metadata": {"name": "x"}, "spec": {"volumes": USED, **user}}
    cluster = Pods(other, refusal=ApiError(403, "Forbidden", "violates PodSecurity"), only_root=True)
    assert World(cluster).step().wait_s is not None
    seccomp = {"seccompProfile": {"type": "RuntimeDefault"}}
    assert cluster.pod["spec"]["securityContext"] == {**seccomp, "runAsNonRoot": True, **expected}
    (container,) = cluster.pod["spec"]["containers"]
    assert "runAsUser" not in container["securityContext"]
    assert cluster.created == 1


def test_a_refused_probe_pod_is_reported_in_the_servers_words() -> None:
    world = World(Pods(refusal=ApiError(403, "Forbidden", "violates PodSecurity")))
    event = world.step().event
    assert event is not None
    assert "violates PodSecurity" in event.message


@promise("S-115")
def test_a_pod_that_no_node_takes_is_removed() -> None:
    cluster = Pods()
    world = World(cluster)
    world.step()
    old = datetime.fromtimestamp(datetime.now(UTC).timestamp() - WAIT_S - 1, UTC)
    cluster.pod["metadata"]["creationTimestamp"] = old.strftime("%Y-%m-%dT%H:%M:%SZ")
    event = world.step().event
    assert event is not None
    assert "no node" in event.message
    assert cluster.pods == {}
