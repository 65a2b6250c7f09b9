"""`python -m tests.hostile.asking`: whatever the controller may ask, of hostile servers, in a process of its own.

Reads {NAME: ENDPOINT} from standard input and writes {"grown_mib": ..., "odd": {NAME: [...]}}: by how much the process
has grown, and what was raised that is no StoreError.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

from datastore.api.source import S3Location, StaticCredentials
from datastore.errors import StoreError
from datastore.fuse.store.base import ByteRange, ETag, ObjectVersion, PartNumber, UploadId, WriteOptions
from datastore.fuse.store.blocking import BlockingStore
from datastore.fuse.store.s3.transport import TransportLimits
from datastore.secret import Secret
from tests.adapter import open_adapter
from tests.onloop import OnLoop

KEYS = StaticCredentials(access_key_id="AKID", secret_access_key=Secret("secret"))
QUICK = TransportLimits(connections=16, connect_s=1.0, idle_s=0.3, call_s=0.6, body_floor=1 << 40, long_s=0.3)
PATIENT = TransportLimits(connections=16, connect_s=60.0, idle_s=60.0, call_s=100.0)
"""For what is answered at once, however busy the machine is."""
TOLD = ETag("0123456789abcdef0123456789abcdef")
OPTIONS = WriteOptions()
VERSIONS = [ObjectVersion(f"k{number}", TOLD, 1 << 20) for number in range(40)]
MANY = [f"k{number}" for number in range(40)]

Operation = Callable[[BlockingStore], object]
OPERATIONS: Mapping[str, Operation] = {
    "list": lambda store: store.list_page(""),
    "head": lambda store: store.head("file"),
    "heads": lambda store: store.heads(MANY),
    "get": lambda store: store.get("file"),
    "get_version": lambda store: store.get("file", if_match=TOLD),
    "get_range": lambda store: store.get("file", byte_range=ByteRange(0, 10)),
    "get_far": lambda store: store.get("file", byte_range=ByteRange(1 << 30, (1 << 30) + 4096)),
    "get_poured": lambda store: store.get(
        "file", byte_range=ByteRange(0, 8 << 20), sink=lambda _info, _at, _body: None
    ),
    "put": lambda store: store.put("file", b"body", OPTIONS),
    "copy": lambda store: store.copy("file", "other"),
    "delete": lambda store: store.delete("file"),
    "delete_many": lambda store: store.delete_many(["a", "b"]),
    "create_upload": lambda store: store.create_upload("file", OPTIONS),
    "upload_part": lambda store: store.upload_part("file", UploadId("u"), PartNumber(1), b"part"),
    "complete_upload": lambda store: store.complete_upload("file", UploadId("u"), [(PartNumber(1), TOLD)], OPTIONS),
    "abort_upload": lambda store: store.abort_upload("file", UploadId("u")),
    "pending_uploads": lambda store: store.pending_uploads(""),
}


MOUNTS_ONLY = frozenset({"get", "many_gets", "get_version", "get_poured"})
"""What only mount servers ask for, each of which is one tenant's: the bytes of objects."""
WORKERS = 16
"""Looks of the controller at once."""


def location_of(endpoint: str) -> S3Location:
    """The bucket of a hostile server."""
    return S3Location(bucket="data", endpoint=endpoint, credentials=KEYS)


def ask_all(endpoint: str, *, on_loop: bool = False) -> dict[str, BaseException | None]:
    """What came of each operation; all are asked at once. on_loop: as a mount asks."""
    adapter = open_adapter(location_of(endpoint), limits=QUICK)
    store = BlockingStore(OnLoop(adapter) if on_loop else adapter)

    def ask(operation: Operation) -> BaseException | None:
        try:
            operation(store)
        except Exception as error:
            return error
        return None

    with ThreadPoolExecutor(len(OPERATIONS)) as pool:
        answers = dict(zip(OPERATIONS, pool.map(ask, OPERATIONS.values()), strict=True))
    store.close()
    return answers


def main() -> None:
    """Ask, and say how it went."""
    endpoints: dict[str, str] = json.load(sys.stdin)
    ask_all("http://127.0.0.1:1")  # what is imported and made once does not count
    before = peak_mib()
    odd: dict[str, list[str]] = {}

    def look(name: str, operation: Operation) -> None:
        with closing(BlockingStore(open_adapter(location_of(endpoints[name]), limits=QUICK))) as store:
            try:
                operation(store)
            except StoreError:
                pass
            except Exception as error:
                odd.setdefault(name, []).append(repr(error))

    asked = [OPERATIONS[name] for name in sorted(OPERATIONS.keys() - MOUNTS_ONLY)]
    with ThreadPoolExecutor(WORKERS) as pool:
        for operation in asked:
            for name in endpoints:
                pool.submit(look, name, operation)
    json.dump({"grown_mib": peak_mib() - before, "odd": odd}, sys.stdout)


def peak_mib() -> float:
    """The most that this process has had in memory. Not of getrusage(2), which begins with the parent's."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


if __name__ == "__main__":
    main()
