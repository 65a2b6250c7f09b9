"""The controller's view of the storage: the Secret, then the backend in threads, with clients that Datastores share.

Storage may be slow, silent or hostile, so it has threads of its own and never keeps a worker of the controller: a look
ends after LOOK_S for whoever waits for it. Each namespace has a few threads at a time and no more: whose server does
not answer waits for it alone.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Generic, TypeVar

from datastore.api.resources import SECRETS
from datastore.api.secretmanifest import SecretManifest, for_storage, parse_secret
from datastore.api.status import Capabilities
from datastore.backends.base import Backend, Identity, Measured, Policy, Released
from datastore.backends.nfs.ssh import Hosts
from datastore.backends.registry import Opening
from datastore.backends.stores import Stores
from datastore.controller.datastores.clusterobjects import ClusterObjects
from datastore.controller.datastores.decide import Facts
from datastore.controller.datastores.effective import EffectiveSpec, SecretRef
from datastore.controller.datastores.settings import Settings
from datastore.controller.runtime.client import ApiError, Client, Unavailable
from datastore.controller.runtime.election import LeaseLost
from datastore.controller.runtime.mistakes import Mistake
from datastore.errors import DatastoreError, DeadlineExceeded, InvalidManifest, TransientStoreError

log = logging.getLogger(__name__)

LOOK_S = 10.0
THREADS = 64
THREADS_EACH = 8
"""Of one namespace. A thread whose look was given up counts until it really ends."""
SECRET_S = 3.0
PROBED_S = 3600.0
DOWN_S = 2.0
KEPT = 4096
COUNT_THREADS = 4
"""For counting large Datastores, one of a namespace at a time: it may take minutes."""
SECRETS_AT_ONCE = 8
T = TypeVar("T")
V = TypeVar("V")


class TTLCache(Generic[V]):
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


@dataclass(slots=True)
class _Turns:
    """How many of a namespace are in a thread or want to be."""

    free: asyncio.Semaphore
    users: int = 0


class FairThreads:
    """Threads that namespaces share, so many for each. Event loop only."""

    def __init__(self, threads: int = THREADS, each: int = THREADS_EACH) -> None:
        self._each = each
        self._pool = ThreadPoolExecutor(max_workers=threads, thread_name_prefix="backend")
        self._turns: dict[str, _Turns] = {}

    async def run(self, namespace: str, call: Callable[[], T], limit_s: float) -> T:
        """What the call returns. Errors: the call's; DeadlineExceeded limit_s after a thread took it."""
        turns = self._turns.setdefault(namespace, _Turns(asyncio.Semaphore(self._each)))
        turns.users += 1
        try:
            await turns.free.acquire()
        except BaseException:
            self._leave(namespace)
            raise
        work = asyncio.get_running_loop().run_in_executor(self._pool, call)
        work.add_done_callback(lambda _: self._done(namespace))
        done, _ = await asyncio.wait({work}, timeout=limit_s)
        if done:
            return work.result()
        raise DeadlineExceeded(f"the storage did not answer within {limit_s:.0f} s")

    def close(self) -> None:
        """Let running calls end by their own deadlines; wait for none."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _done(self, namespace: str) -> None:
        self._turns[namespace].free.release()
        self._leave(namespace)

    def _leave(self, namespace: str) -> None:
        turns = self._turns[namespace]
        turns.users -= 1
        if turns.users == 0:
            del self._turns[namespace]


class BackendProber:
    """See the module. nodes: see Opening. _reached: uid -> the Secret by which a Datastore was reached last."""

    def __init__(self, client: Client, settings: Settings, nodes: Callable[[], Sequence[str]]) -> None:
        self._client = client
        self._settings = settings
        self._threads = FairThreads()
        self._stores = Stores.once()
        self._hosts = Hosts()
        self._nodes = nodes
        self._secrets = TTLCache[SecretManifest](SECRET_S)
        self._probed = TTLCache[Capabilities](PROBED_S)
        self._down = TTLCache[DatastoreError](DOWN_S)
        self._counted = TTLCache[bool](settings.usage_s)
        self._reached: dict[str, SecretManifest | None] = {}
        self._reading = asyncio.Semaphore(SECRETS_AT_ONCE)
        self._counters = FairThreads(COUNT_THREADS, 1)

    def close(self) -> None:
        """Let running calls end by their own deadlines; wait for none."""
        self._threads.close()
        self._counters.close()
        self._stores.close()
        self._hosts.close()

    async def look(self, effective: EffectiveSpec, fence: Callable[[], None], *, made: bool) -> Facts:
        """Make the place and look at it; an error of the storage is part of the answer. made: see Opening.

        fence: raises LeaseLost. Errors: LeaseLost; Unavailable when the API server does not show the Secret.
        """
        server: Hashable = None
        try:
            secret = await self._secret(effective)
            backend, server = self._open(effective, secret, made=made)
            if server is not None and (down := self._down.get(server)) is not None:
                return Facts(error=down)

            def work() -> Facts:
                fence()
                ensured = backend.ensure()
                capabilities = self._capabilities(effective, backend, server)
                return Facts(
                    source=ensured.source,
                    owner=ensured.owner,
                    capabilities=capabilities,
                    measured=ensured.measured,
                    measured_at=_now(),
                )

            facts = await self._threads.run(effective.namespace, work, LOOK_S)
        except DatastoreError as error:
            if server is not None and isinstance(error, TransientStoreError):
                self._down.put(server, error)
            return Facts(error=error)
        except (LeaseLost, Unavailable):
            raise
        except Exception as error:
            log.exception("a look at a backend failed")
            return Facts(error=DatastoreError(f"a defect of the controller: {type(error).__name__}"))
        self._reached[effective.uid] = secret
        return facts

    def may_count(self, effective: EffectiveSpec) -> bool:
        """Whether the last count is long enough ago."""
        return not self._counted.get(effective.uid)

    async def count(self, effective: EffectiveSpec) -> Measured | None:
        """How much is stored, by reading the whole listing; None when it can't be counted."""
        self._counted.put(effective.uid, True)
        try:
            backend, _ = self._open(effective, await self._secret(effective))
            return await self._counters.run(effective.namespace, backend.usage, self._settings.usage_s)
        except (DatastoreError, Unavailable):
            # The next look at the backend says what is wrong.
            return None

    async def release(self, effective: EffectiveSpec, policy: Policy, fence: Callable[[], None]) -> Released:
        """Give the data up, as far as it goes in release_s. Errors: DatastoreError, LeaseLost, Unavailable."""
        try:
            secret = await self._secret(effective)
        except Mistake:
            # A namespace that is deleted loses its Secrets first; the keys that worked last still may.
            if effective.uid not in self._reached:
                raise
            secret = self._reached[effective.uid]
        backend, _ = self._open(effective, secret)

        def work() -> Released:
            until = time.monotonic() + self._settings.release_s

            def go_on() -> bool:
                fence()
                return time.monotonic() < until

            return backend.release(policy, go_on)

        return await self._threads.run(effective.namespace, work, self._settings.release_s + LOOK_S)

    def forget(self, uid: str) -> None:
        """The Datastore is gone."""
        self._reached.pop(uid, None)
        self._counted.drop(uid)

    def forget_secret(self, secret: SecretRef) -> None:
        """It has changed."""
        self._secrets.drop(secret)

    def _open(
        self, effective: EffectiveSpec, secret: SecretManifest | None, *, made: bool = True
    ) -> tuple[Backend, Hashable]:
        """The backend, and what stands for its server. Errors: Mistake."""
        identity = Identity(namespace=effective.namespace, name=effective.name, uid=effective.uid)
        opening = Opening(
            identity=identity,
            spec=effective.spec,
            secret=secret,
            stores=self._stores,
            hosts=self._hosts,
            cluster=ClusterObjects(self._client, asyncio.get_running_loop(), self._settings.namespace),
            nodes=self._nodes,
            class_uid=effective.class_uid,
            made=made,
            parameters=effective.parameters,
            policy=None if effective.class_name else self._settings.policy,
        )
        try:
            return effective.kind.open(opening), effective.kind.server(opening)
        except InvalidManifest as error:
            raise Mistake("SecretInvalid", str(error)) from None

    def _capabilities(self, effective: EffectiveSpec, backend: Backend, server: Hashable) -> Capabilities | None:
        """In a thread: what a directory here can do, tried once an hour on each server, or not at all."""
        if server is None:
            # Not to be found out from here: see claimprobe.py.
            return None
        key = (server, effective.spec.read_only)
        found = self._probed.get(key)
        return found if found is not None else self._probed.put(key, backend.probe())

    async def _secret(self, effective: EffectiveSpec) -> SecretManifest | None:
        """The Secret that the backend is reached with. Errors: Mistake, Unavailable."""
        ref = effective.secret
        if ref is None:
            return None
        found = self._secrets.get(ref)
        if found is not None:
            return found
        # Thousands may want theirs at once, when this replica has just begun to lead: a request that waits for a
        # connection has its deadline all the same.
        async with self._reading:
            found = self._secrets.get(ref)
            if found is not None:
                return found
            try:
                body = await self._client.get(SECRETS, ref.namespace, ref.name)
            except ApiError as error:
                if error.status == 429 or error.status >= 500:  # it says nothing of the storage, nor of the Secret
                    raise Unavailable(str(error)) from error
                raise
        if body is None:
            raise Mistake("SecretNotFound", f"there is no Secret {ref.name} in namespace {ref.namespace}")
        try:
            return self._secrets.put(ref, for_storage(parse_secret(body)))
        except InvalidManifest as error:
            raise Mistake("SecretInvalid", f"Secret {ref.name}: {error}") from None


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
