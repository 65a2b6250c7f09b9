"""Checks the storage: reads the Secret, then calls the backend in threads, with clients that Datastores share.

Storage may be slow, silent or hostile, so its calls run in their own thread pool and never occupy a worker of the
controller, and the caller gives up a check that runs for longer than LOOK_S. Each namespace has a few threads at a time
and no more, so that a server that does not answer delays only its own namespace.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, TypeVar

from datastore.api.objects import timestamp
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
from datastore.errors import DatastoreError, DeadlineExceeded, InvalidManifest, Unreachable

log = logging.getLogger(__name__)

LOOK_S = 10.0
THREADS = 64
THREADS_EACH = 8
"""Threads of one namespace at a time. A thread whose check was given up counts until it really ends."""
SECRET_S = 3.0
PROBED_S = 3600.0
DOWN_S = 2.0
KEPT = 4096
COUNT_THREADS = 4
"""Threads that count large Datastores, which may take minutes; one of a namespace at a time."""
SECRETS_AT_ONCE = 8
T = TypeVar("T")
V = TypeVar("V")


class TTLCache(Generic[V]):
    """A cache whose values expire after good_s; it is emptied once it has KEPT values."""

    def __init__(self, good_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._good_s = good_s
        self._clock = clock
        self._values: dict[Hashable, tuple[float, V]] = {}

    def get(self, key: Hashable) -> V | None:
        """Return the value; None when it is missing or has expired."""
        found = self._values.get(key)
        return found[1] if found is not None and self._clock() < found[0] else None

    def put(self, key: Hashable, value: V) -> V:
        """Store the value, which expires good_s from now, and return it."""
        if len(self._values) >= KEPT:
            self._values.clear()
        self._values[key] = (self._clock() + self._good_s, value)
        return value

    def drop(self, key: Hashable) -> None:
        """Drop the value."""
        self._values.pop(key, None)


@dataclass(slots=True)
class _Turns:
    """The places of one namespace. free: places left; users: how many calls run or wait for a place."""

    free: asyncio.Semaphore
    users: int = 0


class FairThreads:
    """A thread pool that namespaces share, with at most `each` threads for one. Only the event loop may use it."""

    def __init__(self, threads: int = THREADS, each: int = THREADS_EACH) -> None:
        self._each = each
        self._pool = ThreadPoolExecutor(max_workers=threads, thread_name_prefix="backend")
        self._turns: dict[str, _Turns] = {}

    async def run(self, namespace: str, call: Callable[[], T], limit_s: float) -> T:
        """Run the call in a thread; return its result. Errors: the call's; DeadlineExceeded limit_s after its turn."""
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
    """See the module. nodes: see Opening. _reached: uid -> the Secret with which a Datastore was reached last."""

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
        """Create the place in the storage and check it; a storage error is part of the answer. made: see Opening.

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
                    measured_at=timestamp(),
                )

            facts = await self._threads.run(effective.namespace, work, LOOK_S)
        except (LeaseLost, Unavailable):
            raise
        except Exception as error:
            # Any other error is an answer, which comes soon, and may be about this Datastore alone.
            if server is not None and isinstance(error, Unreachable | DeadlineExceeded):
                self._down.put(server, error)
            return Facts(error=failure_of(error))
        self._reached[effective.uid] = secret
        return facts

    def may_count(self, effective: EffectiveSpec) -> bool:
        """Whether the last count of the Datastore was begun usage_s ago or earlier."""
        return not self._counted.get(effective.uid)

    async def count(self, effective: EffectiveSpec) -> Measured | None:
        """Return how much is stored, by reading the whole listing; None when that fails."""
        self._counted.put(effective.uid, True)
        try:
            backend, _ = self._open(effective, await self._secret(effective))
            return await self._counters.run(effective.namespace, backend.usage, self._settings.usage_s)
        except (DatastoreError, Unavailable):
            # The next check of the backend says what is wrong.
            return None

    async def release(self, effective: EffectiveSpec, policy: Policy, fence: Callable[[], None]) -> Released:
        """Apply the policy to the data, for release_s. Errors: DatastoreError, LeaseLost, Unavailable."""
        try:
            secret = await self._secret(effective)
        except Mistake:
            # A namespace that is being deleted first loses its Secrets, or our right to read them; the keys that worked
            # last may still work.
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
        """Drop the cached state of a deleted Datastore."""
        self._reached.pop(uid, None)
        self._counted.drop(uid)

    def forget_secret(self, secret: SecretRef) -> None:
        """Drop a Secret from the cache, since it has changed."""
        self._secrets.drop(secret)

    def _open(
        self, effective: EffectiveSpec, secret: SecretManifest | None, *, made: bool = True
    ) -> tuple[Backend, Hashable]:
        """Return the backend, and the key of its server (see BackendKind.server). Errors: Mistake."""
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
        """Return a directory's capabilities on the server, tested once in PROBED_S; None if untestable. Blocks."""
        if server is None:
            # The controller can't test this storage itself; for claims see claimprobe.py.
            return None
        key = (server, effective.spec.read_only)
        found = self._probed.get(key)
        return found if found is not None else self._probed.put(key, backend.probe())

    async def _secret(self, effective: EffectiveSpec) -> SecretManifest | None:
        """Return the Secret to reach the backend with; None without one. Errors: Mistake, Unavailable."""
        ref = effective.secret
        if ref is None:
            return None
        found = self._secrets.get(ref)
        if found is not None:
            return found
        # When this replica begins to lead, thousands of Secrets are needed at once. Their requests are limited here,
        # because a request's deadline also runs while it waits for a connection.
        async with self._reading:
            found = self._secrets.get(ref)
            if found is not None:
                return found
            try:
                body = await self._client.get(SECRETS, ref.namespace, ref.name)
            except ApiError as error:
                if error.status == 429 or error.status >= 500:  # says nothing about the storage or the Secret
                    raise Unavailable(str(error)) from error
                text = f"Secret {ref.name} in namespace {ref.namespace} can't be read: {error}"
                text += "; the controller needs the right to get it (docs/SECURITY.md)"
                raise Mistake("SecretUnreadable", text) from None
        if body is None:
            text = f"there is no Secret {ref.name} in namespace {ref.namespace}; create it, and the Datastore continues"
            raise Mistake("SecretNotFound", text)
        try:
            return self._secrets.put(ref, for_storage(parse_secret(body)))
        except InvalidManifest as error:
            raise Mistake("SecretInvalid", f"Secret {ref.name}: {error}") from None


def failure_of(error: Exception) -> DatastoreError:
    """Return the error for the status. An exception that is no DatastoreError is a defect of ours, and is logged."""
    if isinstance(error, DatastoreError):
        return error
    log.error("work on a storage failed", exc_info=error)
    return DatastoreError(f"a bug in the controller: {type(error).__name__}; its log says more")
