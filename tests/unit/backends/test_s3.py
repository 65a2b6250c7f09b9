"""datastore.backends.s3 over the verified fake: ownership, release, what is shared."""

from __future__ import annotations

import pytest

from datastore.api.names import MARKER
from datastore.api.source import S3Location
from datastore.backends.base import Identity, Measured, Owner, Policy
from datastore.backends.s3 import S3Backend
from datastore.backends.s3copy import Limits
from datastore.backends.stores import Stores
from datastore.errors import AccessDenied, PreconditionFailed
from datastore.fuse.store.base import Body, UploadId, WriteOptions, WriteResult
from datastore.fuse.store.blocking import BlockingStore
from tests.memorystore import MemoryBucket, MemoryStore
from tests.promises import promise

LOCATION = S3Location(bucket="b", prefix="a/", create=True)


def go_on() -> bool:
    return True


class World:
    def __init__(self) -> None:
        self.asked = MemoryStore(MemoryBucket(min_part_bytes=1))
        self.store = BlockingStore(self.asked)
        self.stores = Stores(lambda _: self.asked)

    def backend(
        self, uid: str = "one", location: S3Location = LOCATION, *, writable: bool = True, limits: Limits | None = None
    ) -> S3Backend:
        identity = Identity(namespace="team", name="digits", uid=uid)
        return S3Backend(location, identity, self.stores, writable=writable, limits=limits or Limits())

    def put(self, *keys: str) -> None:
        for key in keys:
            self.store.put(key, b"12", WriteOptions())

    def keys(self) -> list[str]:
        return [each.key for each in self.store.list_page("").objects]


@pytest.fixture
def world() -> World:
    return World()


def test_an_empty_prefix_is_claimed_once(world: World) -> None:
    assert world.backend("one").ensure().owner is Owner.THIS
    assert world.backend("one").ensure().owner is Owner.THIS
    assert world.backend("two").ensure().owner is Owner.OTHER


def test_a_prefix_with_data_or_without_create_is_not_claimed(world: World) -> None:
    assert world.backend(location=S3Location(bucket="b", prefix="a/")).ensure().owner is Owner.NOBODY
    assert world.keys() == []
    world.put("a/x")
    found = world.backend().ensure()
    assert (found.owner, found.measured) == (Owner.NOBODY, Measured(objects=1, size_bytes=2))
    assert world.keys() == ["a/x"]


def test_a_read_only_datastore_writes_nothing(world: World) -> None:
    backend = world.backend(writable=False)
    assert backend.ensure().owner is Owner.NOBODY
    assert backend.probe().rename is None
    assert world.keys() == []


def test_the_probe_leaves_no_objects_behind(world: World) -> None:
    found = world.backend().probe().model_dump(by_alias=True)
    assert found == {
        "symlinks": True,
        "emptyDirs": True,
        "rename": True,
        "append": True,
        "chmod": True,
        "hardlinks": False,
        "atomicRename": False,
    }
    assert world.keys() == []


def test_a_probe_that_may_not_write_says_so(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(key: str, body: Body, options: WriteOptions) -> WriteResult:
        raise AccessDenied("no")

    monkeypatch.setattr(world.asked, "put", refuse)
    with pytest.raises(AccessDenied):
        world.backend().probe()


def test_delete_takes_only_what_is_marked_for_this_uid(world: World) -> None:
    world.backend("one").ensure()
    world.put("a/x", "a/y/z", "b/x")
    assert "another Datastore" in world.backend("two").release(Policy.DELETE, go_on).message
    assert "stays" in world.backend("one").release(Policy.RETAIN, go_on).message
    assert len(world.keys()) == 4
    assert world.backend("one").release(Policy.DELETE, go_on).done
    assert world.keys() == ["b/x"]
    assert "was not made" in world.backend("one").release(Policy.DELETE, go_on).message
    assert world.keys() == ["b/x"]


def test_a_marker_of_another_kind_protects(world: World) -> None:
    world.put(f"a/{MARKER}", "a/x")
    world.backend().release(Policy.DELETE, go_on)
    assert len(world.keys()) == 2


def test_an_interrupted_release_is_continued(world: World) -> None:
    backend = world.backend()
    backend.ensure()
    world.put("a/x", "a/y")
    answers = iter([True, False, True, True])
    assert not backend.release(Policy.ARCHIVE, lambda: next(answers)).done
    assert world.keys() == ["a.archived-one/x", f"a/{MARKER}", "a/y"]
    assert backend.release(Policy.ARCHIVE, lambda: next(answers)).done
    assert world.keys() == ["a.archived-one/x", "a.archived-one/y"]


def test_a_whole_bucket_is_archived_into_itself(world: World) -> None:
    backend = world.backend(location=S3Location(bucket="b", create=True))
    backend.ensure()
    world.put("x", "y/z")
    assert backend.release(Policy.ARCHIVE, go_on).done
    assert world.keys() == ["archived-one/x", "archived-one/y/z"]


@promise("S-73")
def test_an_object_too_large_for_one_copy_is_archived_in_parts(world: World) -> None:
    backend = world.backend(limits=Limits(whole=8, part=4))
    backend.ensure()
    body = bytes(range(11))
    world.store.put("a/large", body, WriteOptions(content_type="text/x", metadata={"mode": "33188"}))
    world.put("a/small")
    assert backend.release(Policy.ARCHIVE, go_on).done
    assert world.keys() == ["a.archived-one/large", "a.archived-one/small"]
    info = world.store.head("a.archived-one/large")
    assert (bytes(world.store.get("a.archived-one/large")[0]), info.content_type) == (body, "text/x")
    assert info.metadata == {"mode": "33188"}
    assert world.store.pending_uploads("") == []


def test_a_large_object_that_changes_while_it_is_archived_stays(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = world.backend(limits=Limits(whole=8, part=4))
    backend.ensure()
    world.store.put("a/large", bytes(11), WriteOptions())
    begin = world.asked.create_upload

    async def changed(key: str, options: WriteOptions, *, copies: bool) -> UploadId:
        await world.asked.put("a/large", bytes(12), WriteOptions())
        return await begin(key, options, copies=copies)

    monkeypatch.setattr(world.asked, "create_upload", changed)
    with pytest.raises(PreconditionFailed):
        backend.release(Policy.ARCHIVE, go_on)
    assert world.keys() == [f"a/{MARKER}", "a/large"]
    assert world.store.pending_uploads("") == []


def test_usage_counts_everything_but_the_marker(world: World) -> None:
    backend = world.backend()
    backend.ensure()
    world.put(*(f"a/{number}" for number in range(1001)), "b/x")
    assert backend.usage() == Measured(objects=1001, size_bytes=2002)
    assert backend.ensure().measured is None, "more than a page is not counted on the way"


def test_usage_is_of_what_users_stored_where_other_datastores_share_the_bucket(world: World) -> None:
    """Markers and probe objects are not counted as data."""
    world.backend("other").ensure()
    world.put(".datastore.probe-0123/", ".datastore.probe-0123/a", "a/.datastore.probe-4567/b", MARKER)
    whole = world.backend(location=S3Location(bucket="b"))
    assert whole.ensure().measured == whole.usage() == Measured(objects=0, size_bytes=0)
    world.put("a/x", "a/x.datastore.probe-y")
    assert whole.ensure().measured == whole.usage() == Measured(objects=2, size_bytes=4)


def test_datastores_of_a_bucket_share_a_client_and_few_are_open() -> None:
    opened: list[str] = []
    closed: list[str] = []

    class Closing(MemoryStore):
        def close(self) -> None:
            closed.append("")

    def opening(location: S3Location) -> MemoryStore:
        opened.append(location.bucket)
        return Closing()

    stores = Stores(opening, limit=2)
    for prefix in ("a/", "b/"):
        with stores.of(S3Location(bucket="one", prefix=prefix)):
            pass
    assert opened == ["one"]
    with stores.of(S3Location(bucket="one")):
        for bucket in ("two", "three", "four"):
            with stores.of(S3Location(bucket=bucket)):
                pass
    assert len(opened) - len(closed) <= 2
    stores.close()
    assert len(opened) == len(closed)
