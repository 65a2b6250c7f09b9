"""datastore.controller.datastores.reconciler: when a Secret is looked at again, and what a failure says."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import pytest

from datastore.api.names import FINALIZER, volume_name
from datastore.api.resources import CLAIMS, SECRETS, Resource
from datastore.controller.datastores.effective import SecretRef
from datastore.controller.datastores.informers import Informers
from datastore.controller.datastores.reconciler import Reconciler
from datastore.controller.datastores.secretwatch import Uses
from datastore.controller.datastores.settings import Settings
from datastore.controller.runtime.client import ApiError, Unavailable
from datastore.controller.runtime.recorder import Recorder
from tests.patience import PATIENCE_S
from tests.promises import promise
from tests.unit.controller.datastores.test_effective import GANESHA, nfs_class
from tests.unit.controller.playedclient import PlayedClient

KEY = ("team", "digits")
KEYS = SecretRef(namespace="team", name="keys")
TURNS = 20
"""After so many turns without a wait a Datastore counts as one that is worked on for ever."""
FORBIDDEN = ApiError(403, "Forbidden", 'secrets "keys" is forbidden')


class Api(PlayedClient):
    """An API server with one Datastore and perhaps its Secret. looks: how often the Secret was asked for.

    claim: of an NFS server.
    """

    def __init__(self) -> None:
        self.secret: dict[str, Any] | None = None
        self.claim: dict[str, Any] | None = None
        self.looks = 0
        self.silent: Exception | None = None
        spec = {"s3": {"bucket": "digits", "endpoint": "http://h:1", "credentialsSecret": "keys"}}
        metadata = {"name": "digits", "namespace": "team", "uid": "0b6d", "resourceVersion": "1"}
        metadata |= {"finalizers": [FINALIZER]}  # type: ignore[dict-item]
        kind = {"apiVersion": "datastore.dev/v1alpha1", "kind": "Datastore"}
        self.datastore: dict[str, Any] = {**kind, "metadata": metadata, "spec": spec}
        super().__init__(self.datastore)

    async def get(self, resource: Resource, namespace: str, name: str) -> dict[str, Any] | None:
        if resource is CLAIMS and namespace == "exports":
            if self.claim is None:
                raise FORBIDDEN
            return self.claim
        if resource is CLAIMS:
            return None
        assert resource is SECRETS
        self.looks += 1
        if self.silent:
            raise self.silent
        return self.secret

    async def apply(self, body: Mapping[str, Any], subresource: str = "") -> dict[str, Any]:
        assert subresource == "status"
        version = str(int(self.datastore["metadata"]["resourceVersion"]) + 1)
        metadata = {**self.datastore["metadata"], "resourceVersion": version}
        self.datastore = {**self.datastore, "metadata": metadata, "status": body["status"]}
        return self.datastore

    @property
    def ready(self) -> Mapping[str, Any]:
        """Its Ready condition; {} before there is one."""
        return next(iter(self.datastore.get("status", {}).get("conditions", [])), {})


class World:
    def __init__(self) -> None:
        self.api, self.uses = Api(), Uses()
        self.informers = Informers(lambda _: None, lambda _: None, lambda _: True)
        self.informers.datastores.put(self.api.datastore)
        self.woken = asyncio.Event()
        self.reconciler = Reconciler(
            self.api,
            Recorder(self.api, "test"),
            self.informers,
            Settings(first_retry_s=30.0),
            self.uses,
            lambda: (),
            wake=lambda _: self.woken.set(),
            fence=lambda: None,
        )

    async def reason(self) -> str:
        """Of its Ready condition, when all that can be done now is done, also beside the loop."""
        for _ in range(TURNS):
            self.woken.clear()
            await self.reconciler.reconcile(KEY)
            known = self.reconciler._known.get(KEY)
            if (known is None or known.work is None) and not self.woken.is_set():
                return str(self.api.ready.get("reason", ""))
            await asyncio.wait_for(self.woken.wait(), PATIENCE_S)
        raise AssertionError(f"it is worked on without a pause; the Secret was asked for {self.api.looks} times")

    def delete(self) -> None:
        """Ask for the removal of the Datastore, which has worked, and of its data."""
        now = datetime.now(UTC).isoformat(timespec="seconds")
        metadata = {**self.api.datastore["metadata"], "resourceVersion": "2", "deletionTimestamp": now}
        spec = {**self.api.datastore["spec"], "reclaimPolicy": "Delete"}
        self.api.datastore |= {"metadata": metadata, "spec": spec, "status": {"capabilities": {}}}
        self.informers.datastores.put(self.api.datastore)


def run(story: Any) -> None:
    async def told() -> None:
        world = World()
        try:
            await story(world)
        finally:
            world.reconciler.close()

    asyncio.run(told())


@promise("S-113")
def test_a_new_secret_is_used_before_the_next_retry_is_due() -> None:

    async def story(world: World) -> None:
        assert await world.reason() == "SecretNotFound"
        world.api.secret = {"metadata": {"name": "keys", "namespace": "team"}, "data": {}}
        assert await world.reason() == "SecretNotFound", "its time has not come"
        assert world.reconciler.renewed(KEYS) == {KEY}
        assert await world.reason() == "SecretInvalid"

    run(story)


@promise("S-113")
def test_a_secret_that_changes_while_it_is_tried_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:

    async def story(world: World) -> None:
        get = world.api.get

        async def changing(resource: Resource, namespace: str, name: str) -> dict[str, Any] | None:
            found = await get(resource, namespace, name)
            if world.api.looks == 1:
                world.api.secret = {"metadata": {"name": "keys", "namespace": "team"}, "data": {}}
                world.reconciler.renewed(KEYS)
            return found

        monkeypatch.setattr(world.api, "get", changing)
        assert await world.reason() == "SecretInvalid"

    run(story)


@promise("S-113")
@pytest.mark.parametrize(
    "silent",
    [
        Unavailable("the API server does not answer: TimeoutError"),
        ApiError(500, "InternalError", "etcdserver: request timed out"),
        ApiError(429, "TooManyRequests", "try again later"),
    ],
)
def test_an_api_server_that_refuses_a_secret_does_not_make_the_storage_unreachable(silent: Exception) -> None:

    async def story(world: World) -> None:
        world.api.silent = silent
        assert await world.reason() == ""
        assert world.api.looks == 1, "its time has not come"
        world.api.silent = None
        world.reconciler.renewed(KEYS)
        assert await world.reason() == "SecretNotFound"
        world.api.silent = silent
        world.reconciler.renewed(KEYS)
        assert await world.reason() == "SecretNotFound", "what was known stays"

    run(story)


def test_the_secret_of_a_deleted_datastore_is_forgotten() -> None:
    async def story(world: World) -> None:
        await world.reason()
        assert world.uses.of(KEYS) == {KEY}
        world.informers.datastores.drop(KEY)
        await world.reconciler.reconcile(KEY)
        assert world.uses.of(KEYS) == frozenset()

    run(story)


@promise("S-286")
def test_a_claim_of_an_nfs_server_that_somebody_deletes_is_noticed_at_once() -> None:
    """The next check would come after five minutes, and the data be gone with the server's pod."""

    async def story(world: World) -> None:
        there = {"metadata": {"name": volume_name("0b6d"), "namespace": "exports", "uid": "c-1"}}
        claim: dict[str, Any] = {**there, "spec": {}}
        world.api.datastore |= {"spec": {"storageClassName": "nas", "capacity": "1Gi"}}
        world.api.datastore["metadata"] |= {"resourceVersion": "2"}
        world.informers.datastores.put(world.api.datastore)
        world.informers.classes.put({**nfs_class(), "parameters": GANESHA | {"clients": "10.0.0.0/8"}})
        world.informers.claims.put(claim)
        assert await world.reason() == "AccessDenied"
        world.api.claim = {**claim, "metadata": {**claim["metadata"], "deletionTimestamp": "2026-01-31T12:00:00Z"}}
        assert await world.reason() == "AccessDenied", "its time has not come"
        world.informers.claims.put(world.api.claim)
        await world.reason()
        assert "was deleted and goes with its pod" in world.api.ready["message"]

    run(story)


@promise("S-71")
def test_a_secret_that_may_not_be_read_is_reported_in_the_api_servers_words() -> None:

    async def story(world: World) -> None:
        world.api.silent = FORBIDDEN
        assert await world.reason() == "SecretUnreadable"
        words = 'Secret keys in namespace team can\'t be read: the API server: secrets "keys" is forbidden'
        assert words in world.api.ready["message"]
        assert world.api.looks == 1, "its time has not come"

    run(story)


@pytest.mark.parametrize(
    ("error", "reason", "words"),
    [
        (FORBIDDEN, "SecretUnreadable", 'secrets "keys" is forbidden'),
        (KeyError("x"), "Failed", "a bug in the controller: KeyError"),
    ],
)
def test_a_deletion_that_fails_says_why_and_waits_before_the_next_try(
    error: Exception, reason: str, words: str
) -> None:

    async def story(world: World) -> None:
        world.delete()
        world.api.silent = error
        assert await world.reason() == reason
        assert words in world.api.ready["message"]
        assert "remove-finalizer digits" in world.api.ready["message"]
        assert world.api.looks == 1, "its time has not come"

    run(story)
