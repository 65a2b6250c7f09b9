"""datastore.controller.datastores.secretwatch and rotation: what a changed Secret means, and whom it is told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from datastore.api.names import CREDENTIALS
from datastore.api.resources import Resource
from datastore.controller.datastores.effective import SecretRef
from datastore.controller.datastores.rotation import Announcer, to_tell
from datastore.controller.datastores.secretwatch import GONE, SecretWatch, Uses, recent
from datastore.controller.runtime.client import ApiError, Client, Unavailable
from datastore.controller.runtime.election import LeaseLost
from tests.patience import PATIENCE_S
from tests.promises import promise

KEYS = SecretRef(namespace="team", name="keys")
LONG_AGO = "2026-01-31T12:00:00Z"


def test_the_index_maps_each_secret_to_the_datastores_that_use_it() -> None:
    uses = Uses()
    uses.put(("team", "a"), KEYS)
    uses.put(("team", "a"), KEYS)
    uses.put(("other", "b"), KEYS)
    assert uses.of(KEYS) == {("team", "a"), ("other", "b")}
    uses.put(("team", "a"), SecretRef(namespace="team", name="more"))
    uses.put(("other", "b"), None)
    uses.put(("other", "b"), None)
    assert uses.of(KEYS) == frozenset()


class Seen:
    def __init__(self) -> None:
        self.uses = Uses()
        self.uses.put(("team", "a"), KEYS)
        self.told: list[tuple[str, bool]] = []
        self.watch = SecretWatch(Client(), self.uses, lambda: True, self._changed)

    def _changed(self, secret: SecretRef, version: str, rotated: bool) -> None:
        self.told.append((version, rotated))

    def saw(self, kind: str, version: str, name: str = "keys", made: str = LONG_AGO, changed: str = LONG_AGO) -> None:
        metadata = {"name": name, "namespace": "team", "resourceVersion": version, "creationTimestamp": made}
        self.watch.saw(kind, {**metadata, "managedFields": [{"manager": "kubectl", "time": changed}]})


@promise("S-113")
@pytest.mark.parametrize("kind", ["MODIFIED", "ADDED"])
def test_a_changed_secret_is_reported_once_and_an_unused_one_never(kind: str) -> None:
    """Also one between two watches, each of which begins with what there is."""
    seen = Seen()
    seen.saw("ADDED", "5")
    for version, name in (("5", "keys"), ("9", "keys"), ("9", "keys"), ("10", "other")):
        seen.saw(kind, version, name=name)
    assert seen.told == [("5", False), ("9", True)]


def test_a_secret_seen_for_the_first_time_counts_as_rotated_if_it_changed_lately() -> None:
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    for times in ({"changed": now}, {"made": now}):
        seen = Seen()
        seen.saw("ADDED", "5", **times)
        assert seen.told == [("5", True)]
    seen = Seen()
    seen.saw("MODIFIED", "5")
    assert seen.told == [("5", True)]
    assert not recent({"name": "x"}, datetime.now(UTC) + timedelta(hours=1))


@promise("S-113")
def test_a_deleted_secret_is_reported_once_and_its_successor_has_new_keys() -> None:
    seen = Seen()
    seen.saw("ADDED", "5")
    for kind, version, name in (("DELETED", "7", "keys"), ("DELETED", "8", "other"), ("ADDED", "9", "keys")):
        seen.saw(kind, version, name=name)
    assert seen.told == [("5", False), (GONE, False), ("9", True)]


class Watched(Client):
    """An API server whose watches of Secrets show these events, one watch after the other, and then end."""

    def __init__(self, *watches: list[tuple[str, str]]) -> None:
        super().__init__()
        self.watches = list(watches)
        self.all_were_seen = asyncio.Event()

    async def watch(
        self, resource: Resource, namespace: str, *, whole: bool = False, version: str = "0"
    ) -> AsyncGenerator[tuple[str, Any], None]:
        if not self.watches:
            self.all_were_seen.set()
            await asyncio.Event().wait()
        for kind, name in self.watches.pop(0):
            place = {"name": name, "namespace": "team"} if name else {}
            yield kind, {**place, "resourceVersion": "5", "creationTimestamp": LONG_AGO}


@promise("S-113")
@pytest.mark.parametrize(
    ("second", "told"),
    [
        ([("ADDED", "other"), ("BOOKMARK", ""), ("BOOKMARK", "")], [("5", False), (GONE, False)]),
        ([("ADDED", "keys"), ("BOOKMARK", "")], [("5", False)]),
        ([("ADDED", "other")], [("5", False)]),
        ([("BOOKMARK", ""), ("ADDED", "keys")], [("5", False), (GONE, False), ("5", True)]),
    ],
)
def test_a_deletion_between_two_watches_is_reported_with_the_first_bookmark(
    monkeypatch: pytest.MonkeyPatch, second: list[tuple[str, str]], told: list[tuple[str, bool]]
) -> None:
    """A watch that ends before its bookmark says nothing of what it has not shown."""
    monkeypatch.setattr("datastore.controller.runtime.reflector.AGAIN_S", 0.0)
    seen: list[tuple[str, bool]] = []

    async def story() -> None:
        client = Watched([("ADDED", "keys"), ("BOOKMARK", "")], second)
        watch = SecretWatch(client, uses(), lambda: True, lambda _, version, rotated: seen.append((version, rotated)))
        running = asyncio.create_task(watch.run(""))
        await asyncio.wait_for(client.all_were_seen.wait(), PATIENCE_S)
        running.cancel()

    asyncio.run(story())
    assert seen == told


def pod(name: str = "p", *claims: str, annotation: str = "", inline: str = "", **more: Any) -> dict[str, Any]:
    volumes: list[dict[str, Any]] = [{"persistentVolumeClaim": {"claimName": each}} for each in claims]
    if inline:
        volumes.append({"csi": {"driver": "csi.datastore.dev", "nodePublishSecretRef": {"name": inline}}})
    volumes.append({"emptyDir": {}})
    metadata: dict[str, Any] = {"name": name, "namespace": "team", "uid": f"u-{name}", **more.pop("metadata", {})}
    if annotation:
        metadata["annotations"] = {CREDENTIALS: annotation}
    return {"metadata": metadata, "spec": {"nodeName": more.pop("node", "n"), "volumes": volumes}, **more}


@promise("S-113")
@pytest.mark.parametrize(
    ("body", "told"),
    [
        (pod("p", "digits"), True),
        (pod("p", "other", "digits"), True),
        (pod("p", "other"), False),
        (pod("p"), False),
        (pod("p", "digits", annotation="6"), True),
        (pod("p", "digits", annotation="7"), False),
        (pod("p", "digits", annotation="12"), False),
        (pod("p", "digits", annotation="x"), True),
        (pod("p", "digits", node=""), False),
        (pod("p", "digits", metadata={"deletionTimestamp": LONG_AGO}), False),
        (pod("p", "digits", status={"phase": "Succeeded"}), False),
        (pod("p", inline="keys"), True),
        (pod("p", inline="other"), False),
    ],
)
def test_who_is_told(body: dict[str, Any], told: bool) -> None:
    assert bool(list(to_tell([body], frozenset({"digits"}), "keys", "7"))) is told


class Pods(Client):
    """A cluster of pods; refuses with these errors, one after the other."""

    def __init__(self, *pods: dict[str, Any], refusals: Sequence[Exception] = ()) -> None:
        super().__init__()
        self.pods, self.refusals, self.listed = pods, list(refusals), 0

    async def list(
        self, resource: Resource, namespace: str, field_selector: str = "", label_selector: str = ""
    ) -> list[dict[str, Any]]:
        self.listed += 1
        return [each for each in self.pods if each["metadata"]["namespace"] == namespace]

    async def merge(self, resource: Resource, body: Any, change: Any, subresource: str = "") -> Any:
        if self.refusals:
            raise self.refusals.pop()
        assert set(change["metadata"]) == {"annotations"}
        body["metadata"].setdefault("annotations", {}).update(change["metadata"]["annotations"])
        return body


def carried(client: Pods) -> list[str]:
    return [(each["metadata"].get("annotations") or {}).get(CREDENTIALS, "") for each in client.pods]


def uses() -> Uses:
    made = Uses()
    made.put(("team", "digits"), KEYS)
    return made


@promise("S-113")
def test_each_pod_is_annotated_once() -> None:
    cluster = Pods(pod("a", "digits"), pod("b", "digits"), pod("c", "other"))
    announcer = Announcer(cluster, uses(), pace_s=0.0)
    asyncio.run(announcer.announce(KEYS, "7"))
    asyncio.run(announcer.announce(KEYS, "7"))
    assert carried(cluster) == ["7", "7", ""]


def test_what_failed_is_tried_again_and_the_newest_version_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datastore.controller.datastores.rotation.AGAIN_S", 0.01)
    refusals = (LeaseLost("too late"), ApiError(500, "InternalError", "not now"), Unavailable("no answer"))
    cluster = Pods(pod("a", "digits"), refusals=refusals)

    async def story() -> None:
        announcer = Announcer(cluster, uses(), pace_s=0.0)
        announcer.rotated(KEYS, "7")
        announcer.rotated(KEYS, "8")
        running = asyncio.create_task(announcer.run())
        async with asyncio.timeout(PATIENCE_S):
            while carried(cluster) != ["8"]:
                await asyncio.sleep(0.01)
        running.cancel()

    asyncio.run(story())
    assert cluster.listed == 4
