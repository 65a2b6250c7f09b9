"""The stores under the contract: the in-memory fake, as it is and as a stricter server, three real servers, and one of
them over TLS as well; each of these by threads that block, and on a loop."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace

import pytest

from datastore.api.source import S3Location, StaticCredentials
from datastore.fuse.store.base import Capabilities
from datastore.fuse.store.blocking import BlockingStore
from datastore.fuse.store.s3 import probe
from datastore.secret import Secret
from tests.adapter import open_adapter
from tests.contract.deviations import DEVIATIONS
from tests.memorystore import MemoryBucket, MemoryStore
from tests.onloop import OnLoop
from tests.servers import Server

KNOWN = {
    "memory": Capabilities(listed_metadata=True),
    "memory-disk-like": Capabilities(),
    "versitygw": Capabilities(),
    "minio": Capabilities(listed_metadata=True),
    "moto": Capabilities(),
}
"""What these servers can do, as measured; the probe itself stays conservative."""
KEEP_BOTH = {"memory", "minio", "moto"}
"""With them `a` and `a/b` can both exist."""
HEED_NO_CONDITION = {"minio"}
"""Of a DELETE."""

SERVERS = ("moto", "versitygw", "versitygw-tls", "minio")
ON_LOOP = "-on-loop"
_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Subject:
    """A store with an empty bucket of its own. beside: makes another one on this server; its store and name."""

    name: str
    store: BlockingStore
    beside: Callable[[], tuple[BlockingStore, str]]

    @property
    def keeps_both(self) -> bool:
        return self.name in KEEP_BOTH

    @property
    def conditional_delete(self) -> bool:
        return self.name not in HEED_NO_CONDITION


def location_of(server: Server, bucket: str) -> S3Location:
    return S3Location(
        bucket=bucket,
        endpoint=server.endpoint,
        region=server.region,
        force_path_style=True,
        ca_bundle=server.ca_bundle,
        credentials=StaticCredentials(access_key_id=server.access_key, secret_access_key=Secret(server.secret_key)),
    )


@pytest.fixture(params=["memory", "memory-disk-like", *SERVERS, *(server + ON_LOOP for server in SERVERS)])
def subject(request: pytest.FixtureRequest) -> Iterator[Subject]:
    of_server = request.param.removesuffix(ON_LOOP)
    name = of_server.removesuffix("-tls")
    given = request.node.callspec.params
    case = str(given.get("key", given.get("max_keys", "")))
    test = request.node.originalname
    reason = DEVIATIONS.get((name, test, case)) or DEVIATIONS.get((name, test, ""))
    if reason:
        request.node.add_marker(pytest.mark.xfail(reason=reason, strict=True))
    with ExitStack() as opened:
        buckets: dict[str, MemoryBucket] = {}

        def in_memory() -> tuple[BlockingStore, str]:
            made = MemoryBucket(capabilities=KNOWN[name], keeps_both=name in KEEP_BOTH)
            if name == "memory-disk-like":
                made.longest_segment = 255
            made.others = buckets
            buckets[str(len(buckets))] = made
            return BlockingStore(MemoryStore(made)), str(len(buckets) - 1)

        def on_server() -> tuple[BlockingStore, str]:
            server = request.getfixturevalue(of_server.replace("-", "_"))
            location = location_of(server, f"contract-{next(_numbers)}")
            probe(replace(location, create=True), writable=True, deadline_s=100)
            adapter = open_adapter(location, capabilities=KNOWN[name], list_metadata=True)
            store = BlockingStore(OnLoop(adapter) if of_server != request.param else adapter)
            return opened.enter_context(closing(store)), location.bucket

        another = in_memory if name.startswith("memory") else on_server
        yield Subject(name, another()[0], another)


@pytest.fixture
def store(subject: Subject) -> BlockingStore:
    return subject.store
