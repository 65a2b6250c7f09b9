"""Asking backends, outside the event loop: ensure, probe, usage, release, with the keys of the Secret.

Kept for a while, so that a thousand Datastores of one bucket cost little: the Secret (SECRET_S), what a bucket can do
(PROBED_S), and that a server did not answer (DOWN_S). Every map is bounded. Event loop only, but for the calls that the
pool runs.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from typing import Generic, TypeVar

from datastore.api.mountspec import S3Location
from datastore.api.resolve import location_in
from datastore.api.secretmanifest import SecretManifest, certificate_from, credentials_from, parse_secret
from datastore.api.status import Capabilities
from datastore.backends.base import Backend, Identity, Measured, Policy, Released
from datastore.backends.elsewhere import ElsewhereBackend
from datastore.backends.s3 import S3Backend
from datastore.backends.stores import Stores
from datastore.controller.classes import Meant, SecretRef
from datastore.controller.cluster import SECRETS, Cluster
from datastore.controller.decide import Facts
from datastore.controller.mistakes import Mistake
from datastore.controller.settings import Settings
from datastore.errors import DatastoreError, InvalidManifest, TransientStoreError
from datastore.fuse.store.s3 import open_s3
from datastore.retry import Retrier, RetryPolicy

SECRET_S = 3.0
PROBED_S = 3600.0
DOWN_S = 2.0
KEPT = 4096
USAGE_AT_ONCE = 2
"""Counting large Datastores never takes more of the pool than this."""
T = TypeVar("T")
V = TypeVar("V")


class Kept(Generic[V]):
    """Values that are good for a time; at most KEPT."""

    def __init__(self, good_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._good_s = good_s
        self._clock = clock
        self._values: dict[Hashable, tuple[float, V]] = {}

    def get(self, key: Hashable) -> V | None:
        """The value while it is good."""
        found = self._values.get(key)
        return found[1] if found is not None and self._clock() < found[0] else None

    def put(self, key: Hashable, value: V) -> V:
        """Keep it from now."""
        if len(self._values) >= KEPT:
            self._values.clear()
        self._values[key] = (self._clock() + self._good_s, value)
        return value

    def drop(self, key: Hashable) -> None:
        """Forget it."""
        self._values.pop(key, None)


class Looking:
    """See the module. uid -> when it was counted last, and the location it was last reached by."""

    def __init__(self, cluster: Cluster, settings: Settings) -> None:
        self._cluster = cluster
        self._settings = settings
        self._pool = ThreadPoolExecutor(max_workers=settings.workers, thread_name_prefix="backend")
        self._stores = Stores(lambda location: open_s3(location, retrier=Retrier(RetryPolicy(budget_s=0.0))))
        self._secrets = Kept[SecretManifest](SECRET_S)
        self._probed = Kept[Capabilities](PROBED_S)
        self._down = Kept[DatastoreError](DOWN_S)
        self._counted = Kept[bool](settings.usage_s)
        self._reached: dict[str, S3Location] = {}
        self._counting = asyncio.Semaphore(USAGE_AT_ONCE)

    async def close(self) -> None:
        """Let running calls end by their own deadlines; wait for none."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._stores.close()

    async def look(self, meant: Meant) -> Facts:
        """Everything about the backend; an error is part of it, never raised."""
        location: S3Location | None = None
        try:
            location = await self._location(meant)
            if location is not None and (down := self._down.get(_server(location))) is not None:
                return Facts(error=down)
            backend = self._backend(meant, location)
            ensured = await self._run(backend.ensure)
            facts = Facts(
                owner=ensured.owner,
                capabilities=await self._capabilities(backend, location),
                measured=ensured.measured,
                measured_at=_now(),
            )
        except DatastoreError as error:
            if location is not None and isinstance(error, TransientStoreError):
                self._down.put(_server(location), error)
            return Facts(error=error)
        if location is not None:
            self._reached[meant.uid] = location
        return facts

    async def count(self, meant: Meant) -> Measured | None:
        """How much is stored, by reading the whole listing; None when it was counted lately, or can't be."""
        if meant.spec.s3 is None or self._counted.get(meant.uid):
            return None
        self._counted.put(meant.uid, True)
        try:
            location = await self._location(meant)
            async with self._counting:
                return await self._run(self._backend(meant, location).usage)
        except DatastoreError:
            # The next look at the backend says what is wrong.
            return None

    async def release(self, meant: Meant, policy: Policy) -> Released:
        """Give the data up, as far as it goes in release_s. Errors: DatastoreError."""
        location = self._reached.get(meant.uid)
        try:
            location = await self._location(meant)
        except Mistake:
            # A namespace that is deleted loses its Secrets first; the keys that worked last still may.
            if location is None:
                raise
        backend = self._backend(meant, location)
        return await self._run(lambda: backend.release(policy, self._settings.release_s))

    def forget(self, uid: str) -> None:
        """The Datastore is gone."""
        self._reached.pop(uid, None)
        self._counted.drop(uid)

    def forget_secret(self, secret: SecretRef) -> None:
        """It has changed."""
        self._secrets.drop(secret)

    def _backend(self, meant: Meant, location: S3Location | None) -> Backend:
        if location is None:
            return ElsewhereBackend(f"{meant.spec.backend}: the data stays as it is")
        identity = Identity(namespace=meant.namespace, name=meant.name, uid=meant.uid)
        return S3Backend(location, identity, self._stores, writable=not meant.spec.read_only)

    async def _capabilities(self, backend: Backend, location: S3Location | None) -> Capabilities | None:
        if location is None:
            # Not to be found out from here: see claimprobe.py.
            return None
        key = (replace(location, prefix="", create=False), isinstance(backend, S3Backend))
        found = self._probed.get(key)
        return found if found is not None else self._probed.put(key, await self._run(backend.probe))

    async def _location(self, meant: Meant) -> S3Location | None:
        """Where the objects are, with the keys; None for other backends. Errors: Mistake."""
        if meant.spec.s3 is None:
            return None
        if meant.secret is None:
            return location_in(meant.spec.s3, None)
        secret = await self._secret(meant.secret)
        try:
            keys = credentials_from(secret)
        except InvalidManifest as error:
            raise Mistake("SecretInvalid", str(error)) from None
        s3 = meant.spec.s3
        if not s3.ca_bundle:
            s3 = s3.model_copy(update={"ca_bundle": certificate_from(secret)})
        return location_in(s3, keys)

    async def _secret(self, ref: SecretRef) -> SecretManifest:
        found = self._secrets.get(ref)
        if found is not None:
            return found
        body = await self._cluster.get(SECRETS, ref.namespace, ref.name)
        if body is None:
            raise Mistake("SecretNotFound", f"there is no Secret {ref.name} in namespace {ref.namespace}")
        try:
            return self._secrets.put(ref, parse_secret(body))
        except InvalidManifest as error:
            raise Mistake("SecretInvalid", f"Secret {ref.name}: {error}") from None

    async def _run(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, call)


def _server(location: S3Location) -> Hashable:
    return replace(location, prefix="", create=False)


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
