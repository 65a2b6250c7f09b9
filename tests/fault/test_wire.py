"""The whole S3 path under faults of the wire: adapter, retries and file system behind a proxy that spoils answers."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from datastore.api.source import S3Location, StaticCredentials
from datastore.fuse.data import multipart
from datastore.fuse.store.retrying import Retrier
from datastore.fuse.store.s3 import open_s3
from datastore.fuse.store.s3.transport import TransportLimits
from datastore.fuse.vfs.build import build_filesystem
from datastore.secret import Secret
from tests.driving import resolve, the_loop
from tests.fault.sweeping import same_but_markers
from tests.killing import kill
from tests.localfs import LocalFs
from tests.model.world import outcome
from tests.mounted import spec_at
from tests.promises import promise
from tests.servers import Server, boto_client, make_bucket
from tests.wireproxy import KINDS, Spoilt, WireProxy, no_faults, wire_proxy

IDLE_S = 0.3
"""What stands for the 20 s after which a silent server is given up."""
STALL_S = 1.5
SLOW_MAX = 20
"""So often may a healthy server on a busy machine be taken for a silent one."""
PATIENT = TransportLimits(connect_s=60.0, idle_s=60.0, call_s=100.0)
HASTY = TransportLimits(connect_s=60.0, idle_s=IDLE_S, call_s=100.0)
"""Where a server is silent, and only there: a busy one may be taken for it."""
BUDGET_S = 60.0
PART = 5 << 20
"""The smallest that S3 takes."""
LARGE = os.urandom(1 << 20) * 5 + b"the second part"
_numbers = itertools.count(1)


@dataclass(frozen=True)
class Case:
    """before, after: bodies by key. give: what is done and seen; gives: what is to be seen."""

    name: str
    before: Mapping[str, bytes]
    give: Callable[[LocalFs], Any]
    after: Mapping[str, bytes]
    gives: Any = None
    moves: bool = False


def _append(local: LocalFs) -> None:
    with local.opened("d/f", os.O_RDWR) as file:
        file.write(b" and new", 3)


TREE = {"d/": b"", "d/f": b"old", "d/e/": b"", "d/e/g": b"deep"}
MOVED = {f"m{key[1:]}": body for key, body in TREE.items()}


def less(key: str) -> dict[str, bytes]:
    """TREE without one key."""
    return {name: body for name, body in TREE.items() if name != key}


CASES = (
    Case("read", TREE, lambda local: local.read("d/e/g"), TREE, b"deep"),
    Case("list", TREE, lambda local: local.listdir("d"), TREE, [b"e", b"f"]),
    Case("write", TREE, lambda local: local.write("d/new", b"new"), {**TREE, "d/new": b"new"}),
    Case("append", TREE, _append, {**TREE, "d/f": b"old and new"}),
    Case("write large", {}, lambda local: local.write("big", LARGE), {"big": LARGE}),
    Case("read large", {"big": LARGE}, lambda local: local.read("big"), {"big": LARGE}, LARGE),
    Case("mkdir", TREE, lambda local: local.mkdir("d/n"), {**TREE, "d/n/": b""}),
    Case("rmdir", {**TREE, "d/n/": b""}, lambda local: local.rmdir("d/n"), TREE),
    Case("unlink", TREE, lambda local: local.unlink("d/f"), less("d/f")),
    Case("rename", TREE, lambda local: local.rename("d/f", "x"), {**less("d/f"), "x": b"old"}, moves=True),
    Case("rename directory", TREE, lambda local: local.rename("d", "m"), MOVED, moves=True),
)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """As few bytes as a multipart upload can have."""
    monkeypatch.setattr(multipart, "SINGLE_MAX", PART)
    monkeypatch.setattr(multipart, "PART_SIZE", PART)


class Wire:
    """One mount of a prefix of its own behind the proxy, without a kernel."""

    def __init__(
        self, proxy: WireProxy, server: Server, client: Any, bucket: str, directory: Path, limits: TransportLimits
    ) -> None:
        self.proxy = proxy
        self._limits = limits
        self._client, self._bucket = client, bucket
        self._prefix = f"p{next(_numbers)}/"
        self._directory = directory
        keys = StaticCredentials(access_key_id=server.access_key, secret_access_key=Secret(server.secret_key))
        self._s3 = S3Location(
            bucket=bucket,
            prefix=self._prefix,
            endpoint=proxy.endpoint,
            region=server.region,
            force_path_style=True,
            credentials=keys,
        )

    def fill(self, before: Mapping[str, bytes]) -> None:
        """As another tool, past the proxy."""
        for key, body in before.items():
            self._client.put_object(Bucket=self._bucket, Key=self._prefix + key, Body=body)

    def keys(self) -> dict[str, bytes]:
        """As another tool, past the proxy."""
        listed = self._client.list_objects_v2(Bucket=self._bucket, Prefix=self._prefix).get("Contents", [])
        found = {}
        for each in listed:
            body = self._client.get_object(Bucket=self._bucket, Key=each["Key"])["Body"]
            found[each["Key"].removeprefix(self._prefix)] = body.read()
        return {key: body for key, body in found.items() if key}

    def uploads(self) -> list[Any]:
        """Unfinished multipart uploads of this mount."""
        found = self._client.list_multipart_uploads(Bucket=self._bucket).get("Uploads", [])
        return [each for each in found if each["Key"].startswith(self._prefix)]

    @contextmanager
    def mounted(self, budget_s: float) -> Iterator[LocalFs]:
        """A file system over the prefix, which ends when all is sent. budget_s: how long a call is tried again."""
        retrier = Retrier(first_delay_s=0.002, max_delay_s=0.02, budget_s=budget_s)
        store = open_s3(self._s3, retrier=retrier, limits=self._limits)
        spec = spec_at(self._directory, self._s3, metadata_ttl_s=0.0)
        filesystem = build_filesystem(spec, store, loop=the_loop())
        try:
            yield LocalFs(filesystem)
            self.proxy.plan = no_faults
            assert any(resolve(filesystem.flush_all()) == [] for _ in range(SLOW_MAX))
        finally:
            self.proxy.plan = no_faults
            resolve(filesystem.stop())
            kill(filesystem)
            store.close()


@pytest.fixture(scope="module")
def proxy(versitygw: Server) -> Iterator[WireProxy]:
    """One proxy for the module."""
    with wire_proxy(versitygw, STALL_S) as made:
        yield made


@pytest.fixture(scope="module")
def bucket(versitygw: Server) -> str:
    """One bucket for the module."""
    return make_bucket(versitygw, f"wire-{os.getpid()}")


@pytest.fixture(scope="module")
def client(versitygw: Server) -> Any:
    """Another tool; making one takes longer than a case."""
    return boto_client(versitygw)


Make = Callable[[Case, Spoilt | None], Wire]


@pytest.fixture
def make(proxy: WireProxy, versitygw: Server, client: Any, bucket: str, tmp_path: Path) -> Make:
    """A mount of a new prefix with what a case begins with, for answers that are spoilt so."""

    def made(case: Case, kind: Spoilt | None) -> Wire:
        limits = HASTY if kind is not None and kind.way == "silence" else PATIENT
        wire = Wire(proxy, versitygw, client, bucket, tmp_path / str(next(_numbers)), limits)
        wire.fill(case.before)
        return wire

    return made


def requests_of(case: Case, make: Make) -> int:
    """How many requests a healthy run sends, which must do what it is to do."""
    wire = make(case, None)
    with wire.mounted(BUDGET_S) as local:
        first = len(wire.proxy.requests)
        assert case.give(local) == case.gives
        count = len(wire.proxy.requests) - first
    assert same_but_markers(wire.keys(), case.after)
    return count


def seen_at_last(case: Case, local: LocalFs) -> Any:
    """What a call gives when nothing is spoilt any more; a busy machine may be silent for IDLE_S by itself."""
    for _ in range(SLOW_MAX):
        with contextlib.suppress(TimeoutError):
            return case.give(local)
    return case.give(local)


def spoiling(wire: WireProxy, n: int, kind: Spoilt, *, lasting: bool) -> None:
    """The n-th request from now on, and with `lasting` all that follow."""
    base = len(wire.requests) + n
    wire.plan = lambda index: kind if index == base or (lasting and index > base) else None


@promise("S-66")
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_one_spoilt_answer_is_not_felt(case: Case, kind: Spoilt, make: Make) -> None:
    """At every position: the same result as without, and nothing left; a refusal and another version are told."""
    for n in range(requests_of(case, make)):
        where = f"request {n}: {kind.name}"
        wire = make(case, kind)
        with wire.mounted(BUDGET_S) as local:
            spoiling(wire.proxy, n, kind, lasting=False)
            seen: list[Any] = []
            number = outcome(lambda: seen.append(case.give(local)))  # noqa: B023  called before the next round
            told = kind.status == 403 or (kind.way == "etag" and number in {errno.ESTALE, errno.EIO})
            assert number == 0 or told, f"{where}: errno {number}; {wire.proxy.requests[-8:]}"
            assert not seen or seen == [case.gives], where
        left = wire.keys()
        done = same_but_markers(left, case.after)
        refused = number != 0 and (case.moves or same_but_markers(left, case.before))
        assert done or refused, f"{where}: {sorted(left)}"
        assert not wire.uploads() or not kind.before, f"{where}: an upload is left"


@promise("S-131")
@pytest.mark.parametrize(
    ("name", "what"), [("write", "/d/new"), ("write large", "partNumber=1"), ("write large", "partNumber=2")]
)
def test_a_bit_that_changes_on_the_way_is_noticed(name: str, what: str, make: Make) -> None:
    """At each body that is sent: the store refuses it, and it is sent once more."""
    (case,) = (case for case in CASES if case.name == name)
    (damaged,) = (kind for kind in KINDS if kind.way == "damage")
    wire, sent = make(case, damaged), list[str]()

    def first(index: int) -> Spoilt | None:
        line = wire.proxy.requests[index]
        if not line.startswith("PUT ") or what not in line:
            return None
        sent.append(line)
        return damaged if len(sent) == 1 else None

    with wire.mounted(BUDGET_S) as local:
        wire.proxy.plan = first
        case.give(local)
    assert same_but_markers(wire.keys(), case.after)
    assert len(sent) == 2


@promise("S-64", "S-66")
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_an_outage_is_an_error_and_passes(case: Case, kind: Spoilt, make: Make) -> None:
    """From every position on no answer is right: an error in time; then everything works again."""
    for n in range(requests_of(case, make)):
        where = f"from request {n} on: {kind.name}"
        wire = make(case, kind)
        with wire.mounted(budget_s=0.05) as local:
            spoiling(wire.proxy, n, kind, lasting=True)
            seen: list[Any] = []
            number = outcome(lambda: seen.append(case.give(local)))  # noqa: B023  called before the next round
            assert number or seen == [case.gives], where
            wire.proxy.plan = no_faults
            if case.gives is not None:
                assert seen_at_last(case, local) == case.gives, where
        left = wire.keys()
        for key, body in left.items():
            states = (case.before, case.after)
            assert any(state.get(key) == body for state in states) or not body, f"{where}: {key} holds {body[:20]!r}"
        done = same_but_markers(left, case.after)
        assert done or (number and (case.moves or same_but_markers(left, case.before))), f"{where}: {sorted(left)}"
