"""datastore.controller.datastores.serverclaims: the claims of NFS servers in namespaces that kopf does not watch."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import pytest

from datastore.api.names import OWNER
from datastore.api.resources import Resource
from datastore.api.volumecontext import DRIVER
from datastore.controller.datastores import serverclaims
from datastore.controller.datastores.informers import Informers
from datastore.controller.datastores.serverclaims import watch_server_claims
from datastore.controller.runtime import reflector
from datastore.controller.runtime.client import Client
from datastore.controller.runtime.queue import Key
from tests.patience import PATIENCE_S
from tests.promises import promise


def claim(name: str, owner: str) -> dict[str, Any]:
    marks = {"annotations": {OWNER: owner}} if owner else {}
    metadata = {"namespace": "exports", "name": name, "uid": name, "resourceVersion": "1", **marks}
    return {"metadata": metadata, "spec": {"storageClassName": "ssd"}}


class Api(Client):
    """lists: what each list shows. shown: what the watch after it shows. asked: the namespaces."""

    def __init__(self, lists: list[list[dict[str, Any]]], shown: list[list[tuple[str, dict[str, Any]]]]) -> None:
        super().__init__()
        self.lists, self.shown, self.asked = lists, shown, set[str]()
        self.all_was_seen = asyncio.Event()

    async def pages(
        self, resource: Resource, namespace: str, *_: str, **__: Any
    ) -> AsyncGenerator[tuple[Sequence[dict[str, Any]], str], None]:
        self.asked.add(namespace)
        if not self.lists:
            self.all_was_seen.set()
            await asyncio.Event().wait()
        yield self.lists.pop(0), "7"

    async def watch(
        self, resource: Resource, namespace: str, *, whole: bool = False, version: str = "0"
    ) -> AsyncGenerator[tuple[str, Any], None]:
        assert (whole, version) == (True, "7")
        for event in self.shown.pop(0):
            yield event


def name_in_class(informers: Informers, namespace: str) -> None:
    """Make a class whose NFS servers are in this namespace."""
    tell = next(watch.tell for watch in informers.watches() if watch.resource.plural == "storageclasses")
    parameters = {"backend": "nfs", "provisioner": "ganesha", "namespace": namespace}
    metadata = {"name": namespace, "uid": namespace, "resourceVersion": "1"}
    tell({"type": None, "object": {"metadata": metadata, "provisioner": DRIVER, "parameters": parameters}})


@promise("S-286")
def test_a_claim_that_goes_while_it_is_watched_or_between_two_watches_wakes_its_datastore(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Claims of anybody else in that namespace, and namespaces that kopf watches, are left alone."""
    monkeypatch.setattr(reflector, "AGAIN_S", 0.0)
    woken: list[Key] = []
    informers = Informers(woken.append, woken.append, lambda namespace: namespace == "served")
    for namespace in ("exports", "served"):
        name_in_class(informers, namespace)
    a, b, other = claim("a", "team/a"), claim("b", "team/b"), claim("other", "")
    api = Api([[a, b, other], []], [[("DELETED", a), ("BOOKMARK", {})], [("ADDED", other)]])

    async def story() -> None:
        running = asyncio.create_task(watch_server_claims(api, informers))
        await asyncio.wait_for(api.all_was_seen.wait(), PATIENCE_S)
        running.cancel()

    asyncio.run(story())
    assert woken == [("team", "a"), ("team", "b"), ("team", "a"), ("team", "b")]
    assert api.asked == {"exports"}


@promise("S-286")
def test_a_namespace_that_a_class_names_later_is_watched_while_the_others_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serverclaims, "LOOK_S", 0.0)
    informers = Informers(lambda _: None, lambda _: None, lambda _: False)
    name_in_class(informers, "exports")
    api = Api([], [])

    async def story() -> None:
        running = asyncio.create_task(watch_server_claims(api, informers))
        await asyncio.wait_for(api.all_was_seen.wait(), PATIENCE_S)
        name_in_class(informers, "later")
        async with asyncio.timeout(PATIENCE_S):
            while "later" not in api.asked:
                await asyncio.sleep(0)
        running.cancel()

    asyncio.run(story())
