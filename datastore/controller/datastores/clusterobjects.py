"""Gives backends, which run in threads, the controller's own client, with its fence, request counts and deadlines."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar

from datastore.api.names import APPLIED
from datastore.api.resources import BY_KIND, Resource
from datastore.controller.datastores.desired import is_ours
from datastore.controller.runtime.client import DEADLINE_S, ApiError, Client
from datastore.controller.runtime.comparing import digest, holds
from datastore.errors import (
    AccessDenied,
    DatastoreError,
    DeadlineExceeded,
    InvalidRequest,
    NotFound,
    ServerFault,
    Throttled,
)

Raw = Mapping[str, Any]
T = TypeVar("T")


class ClusterObjects:
    """See backends.base.Cluster. loop: the client's event loop. Errors: also the client's Unavailable and LeaseLost."""

    def __init__(self, client: Client, loop: asyncio.AbstractEventLoop, namespace: str) -> None:
        self.namespace = namespace
        self._client = client
        self._loop = loop

    def get(self, kind: Resource, namespace: str, name: str) -> Raw | None:
        """See Cluster."""
        return self._done(self._client.get(kind, namespace, name))

    def apply(self, body: Raw, uid: str) -> Raw:
        """See Cluster."""
        return self._done(self._apply(body, uid))

    def delete(self, kind: Resource, namespace: str, name: str, uid: str) -> bool:
        """See Cluster."""
        return self._done(self._delete(kind, namespace, name, uid))

    async def _apply(self, body: Raw, uid: str) -> Raw:
        """Apply the body unless the object holds it. The hash of the body, an annotation, also shows dropped fields."""
        metadata = body["metadata"]
        wanted = {**body, "metadata": {**metadata, "annotations": {**metadata["annotations"], APPLIED: digest(body)}}}
        here = await self._client.get(BY_KIND[body["kind"]], metadata["namespace"], metadata["name"])
        if here is None:
            return await self._client.apply(wanted)
        if not is_ours(here, uid):
            where = f"{body['kind']} {metadata['namespace']}/{metadata['name']}"
            raise InvalidRequest(f"{where} exists and was not made for this Datastore")
        return here if holds(here, wanted) else await self._client.apply(wanted)

    async def _delete(self, kind: Resource, namespace: str, name: str, uid: str) -> bool:
        here = await self._client.get(kind, namespace, name)
        if here is None or not is_ours(here, uid):
            return False
        if "deletionTimestamp" not in here["metadata"]:
            await self._client.delete(kind, namespace, name, here["metadata"]["uid"])
        return True

    def _done(self, work: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(2 * DEADLINE_S)
        except TimeoutError:
            future.cancel()
            raise DeadlineExceeded("the API server did not answer") from None
        except ApiError as error:
            raise _refusal(error) from error


def _refusal(error: ApiError) -> DatastoreError:
    if error.status == 403:
        return AccessDenied(f"{error}; docs/NFS.md says which rights the controller needs in the namespace")
    if error.status == 429:
        return Throttled(str(error))
    if error.status >= 500 or error.status == 409:
        return ServerFault(str(error))
    return NotFound(str(error)) if error.status == 404 else InvalidRequest(str(error))
