"""datastore.controller.datastores.pods: who uses what."""

from __future__ import annotations

import asyncio
from typing import Any

from datastore.api.objects import claims_of
from datastore.api.resources import Resource
from datastore.controller.datastores.pods import UsingPods, datastores_of, inline_secrets_of
from datastore.controller.runtime.client import Client
from tests.promises import promise

DRIVER = "csi.datastore.dev"


def pod(name: str, *volumes: dict[str, Any], node: str = "n-1", phase: str = "Running") -> dict[str, Any]:
    spec = {"volumes": list(volumes), **({"nodeName": node} if node else {})}
    return {"metadata": {"name": name, "namespace": "team"}, "spec": spec, "status": {"phase": phase}}


def by_claim(claim: str) -> dict[str, Any]:
    return {"name": "v", "persistentVolumeClaim": {"claimName": claim}}


def inline(datastore: str, driver: str = DRIVER) -> dict[str, Any]:
    attributes = {"volumeAttributes": {"datastore": datastore}, "nodePublishSecretRef": {"name": "keys"}}
    return {"name": "i", "csi": {"driver": driver, **attributes}}


def test_a_pod_that_has_ended_uses_no_volume() -> None:
    assert claims_of(pod("p", by_claim("a"), by_claim("b"))) == {"a", "b"}
    assert claims_of(pod("p", by_claim("a"), phase="Failed")) == frozenset()
    assert inline_secrets_of(pod("p", inline("digits"))) == {"keys"}
    assert datastores_of(pod("p", inline("digits"), phase="Succeeded")) == frozenset()


@promise("S-132")
def test_inline_volumes_of_ours_name_datastores() -> None:
    """A pod without a node gets none any more, so it keeps none from going."""
    assert datastores_of(pod("p", inline("digits"), by_claim("a"))) == {"digits"}
    assert datastores_of(pod("p", inline("digits"), node="")) == frozenset()
    assert datastores_of(pod("p", inline("digits", "ebs.csi.aws.com"))) == frozenset()
    assert datastores_of(pod("p", {"name": "x", "csi": {"driver": DRIVER}})) == frozenset()


class Listed(Client):
    def __init__(self, *pods: dict[str, Any]) -> None:
        super().__init__()
        self.pods, self.lists = pods, 0

    async def list(
        self, resource: Resource, namespace: str, field_selector: str = "", label_selector: str = ""
    ) -> list[dict[str, Any]]:
        self.lists += 1
        return [each for each in self.pods if each["metadata"]["namespace"] == namespace]


@promise("S-132")
def test_one_list_answers_all_requests_made_before_it_began() -> None:
    """It serves nobody who asked later, because the pods of the meantime are not in it."""
    cluster, now = Listed(pod("a", by_claim("digits")), pod("b", inline("digits")), pod("c", inline("other"))), [10.0]
    using = UsingPods(cluster, lambda: now[0])

    async def story() -> None:
        assert await using.of("team", "digits", "digits", 9.0) == ("a", "b (inline)")
        assert await using.of("team", "", "digits", 10.0) == ("b (inline)",)
        assert await using.of("team", "", "none", 8.0) == ()
        assert cluster.lists == 1
        now[0] = 10.5
        assert await using.of("team", "", "other", 10.2) == ("c (inline)",)
        assert cluster.lists == 2
        now[0] = 20.0
        assert await using.of("elsewhere", "", "other", 10.2) == ()
        await using.of("team", "", "other", 10.2)
        assert cluster.lists == 4, "a list is old after a second"

    asyncio.run(story())
