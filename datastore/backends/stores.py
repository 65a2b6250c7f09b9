"""S3 clients shared by the Datastores of one bucket and one set of keys: a thousand prefixes need one connection pool.

Threads: any. While more than `limit` clients are open, the least recently used ones that nobody uses are closed.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from datastore.api.source import S3Location
from datastore.fuse.store.base import ObjectStore
from datastore.fuse.store.blocking import BlockingStore
from datastore.fuse.store.retrying import Retrier
from datastore.fuse.store.s3 import open_s3

Open = Callable[[S3Location], ObjectStore]


@dataclass(slots=True)
class _Shared:
    store: BlockingStore
    users: int = 0
    proven: bool = False


class Stores:
    """Clients by location without its prefix. INVARIANT: before close() only unused clients are closed."""

    def __init__(self, opening: Open, limit: int = 32) -> None:
        self._open = opening
        self._limit = limit
        self._lock = threading.Lock()
        self._shared: OrderedDict[S3Location, _Shared] = OrderedDict()

    @classmethod
    def once(cls) -> Stores:
        """Return Stores whose clients try each request once: the reconcile loop tries again."""
        return cls(lambda location: open_s3(location, retrier=Retrier(budget_s=0.0)))

    @contextmanager
    def of(self, location: S3Location) -> Iterator[BlockingStore]:
        """Lend the client for a location to a `with` block."""
        key = replace(location, prefix="", create=False)
        with self._lock:
            shared = self._shared.get(key)
            if shared is None:
                shared = self._shared[key] = _Shared(BlockingStore(self._open(key)))
            self._shared.move_to_end(key)
            shared.users += 1
            spare = self._spare()
        for store in spare:
            store.close()
        try:
            yield shared.store
        finally:
            with self._lock:
                shared.users -= 1

    def prove(self, location: S3Location, trial: Callable[[], object]) -> None:
        """Run the trial unless it succeeded before for the location's client. Errors: the trial's."""
        key = replace(location, prefix="", create=False)
        shared = self._shared.get(key)
        if shared is None or not shared.proven:
            trial()
        if shared is not None:
            shared.proven = True

    def close(self) -> None:
        """Close all clients; idempotent."""
        with self._lock:
            stores = [shared.store for shared in self._shared.values()]
            self._shared.clear()
        for store in stores:
            store.close()

    def _spare(self) -> list[BlockingStore]:
        idle = [key for key, shared in self._shared.items() if shared.users == 0]
        return [self._shared.pop(key).store for key in idle[: max(0, len(self._shared) - self._limit)]]
