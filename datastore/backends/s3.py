"""The S3 backend: a bucket, or a prefix of one.

Ownership: what `create: true` made has a marker, the object `<prefix>.datastore.owner`, with the Datastore's uid in it.
The marker is written only into an empty bucket or prefix, and only with If-None-Match, so that one of two Datastores
becomes the owner. Delete and Archive read the marker first, each time, and touch nothing without it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from datastore.api.endpoints import AWS
from datastore.api.names import MARKER
from datastore.api.source import S3Location
from datastore.api.status import Capabilities
from datastore.backends.base import Ensured, Identity, Measured, Owner, Policy, Released
from datastore.backends.s3copy import Limits, copy
from datastore.backends.s3probe import PROBE, capabilities
from datastore.backends.stores import Stores
from datastore.errors import AlreadyExists, BucketNotFound, NotFound, StoreError
from datastore.fuse.store.base import ByteRange, ListedObject, WriteOptions
from datastore.fuse.store.blocking import BlockingStore
from datastore.fuse.store.s3 import probe, remove_bucket

LOOK_KEYS = 250
"""The most keys that ensure() lists: a page of a thousand may have 4 MB, and many Datastores are checked at once."""
MARK_BYTES = 4096
"""The most bytes that are read of a marker; one that we write has some 200."""
PAGE_KEYS = 1000
USAGE_PAGES = 1000
"""The most pages that are counted, for a million objects: each page is a request, which the bucket's owner pays for."""


@dataclass(frozen=True, slots=True)
class _Mark:
    uid: str
    made_bucket: bool


class S3Backend:
    """See Backend. made: see Opening (registry.py)."""

    def __init__(
        self,
        location: S3Location,
        identity: Identity,
        stores: Stores,
        *,
        writable: bool,
        made: bool = False,
        limits: Limits = Limits(),  # noqa: B008  (frozen)
    ) -> None:
        self._location = location
        self._identity = identity
        self._stores = stores
        self._writable = writable
        self._made = made
        self._limits = limits
        self._marker = location.prefix + MARKER

    def ensure(self) -> Ensured:
        """See Backend. Errors: StoreError, with the field to correct and the server's words.

        A bucket that was there before and is gone is not created again: perhaps its server lacks its disk for a while.
        """
        with self._stores.of(self._location) as store:
            made_bucket = False
            try:
                if self._location.region:
                    # The shared client finds a bucket in any region; the probe fails for a wrong one in the manifest.
                    self._stores.prove(self._location, self._probe)
                page = store.list_page(self._location.prefix, max_keys=LOOK_KEYS)
            except StoreError as error:
                # The probe has a client of its own; it makes the bucket, or its error names the field to correct.
                self._probe()
                made_bucket = isinstance(error, BucketNotFound) and not self._made
                page = store.list_page(self._location.prefix, max_keys=LOOK_KEYS)
            owner = self._claim(store, page.objects, made_bucket=made_bucket)
            counted = None if page.next_token else _count(page.objects)
            return Ensured(source=replace(self._location, credentials=None), owner=owner, measured=counted)

    def owner(self) -> Owner:
        """Return for which Datastore the data was made. Errors: StoreError."""
        with self._stores.of(self._location) as store:
            return self._owner(store)

    def probe(self) -> Capabilities:
        """See Backend."""
        if not self._writable:
            return Capabilities.model_validate({})
        with self._stores.of(self._location) as store:
            return capabilities(store, self._location.prefix)

    def usage(self) -> Measured | None:
        """See Backend. None above a million objects."""
        objects = size_bytes = 0
        with self._stores.of(self._location) as store:
            for number, listed in enumerate(_pages(store, self._location.prefix)):
                if number >= USAGE_PAGES:
                    return None
                counted = _count(listed)
                objects, size_bytes = objects + counted.objects, size_bytes + counted.size_bytes
        return Measured(objects=objects, size_bytes=size_bytes)

    def release(self, policy: Policy, go_on: Callable[[], bool]) -> Released:
        """See Backend."""
        if policy is Policy.RETAIN:
            return Released(done=True, message=f"{self._where()} stays as it is (reclaimPolicy Retain)")
        with self._stores.of(self._location) as store:
            try:
                mark = self._read(store)
            except BucketNotFound:
                return Released(done=True, message=f"{self._where()}: the bucket is gone already")
            if mark is None or mark.uid != self._identity.uid:
                why = "it was not made for this Datastore" if mark is None else "it belongs to another Datastore"
                return Released(done=True, message=f"{self._where()} stays as it is: {why}")
            if policy is Policy.ARCHIVE:
                return self._archive(store, go_on)
            return self._delete(store, go_on, mark)

    def _probe(self) -> None:
        if not self._made:
            probe(self._location, writable=self._writable)
            return
        try:
            probe(replace(self._location, create=False), writable=self._writable)
        except BucketNotFound as error:
            where = f"bucket {self._location.bucket} at {self._location.endpoint or AWS}"
            text = f"{where} is gone, and is not created again: restore it; if its data is lost, create an empty one"
            raise BucketNotFound(f"{text} ({error.server_message or error})", code=error.code) from error

    def _claim(self, store: BlockingStore, listed: Sequence[ListedObject], *, made_bucket: bool) -> Owner:
        if not self._location.create or not self._writable:
            return Owner.NOBODY
        if not listed:
            body = json.dumps(
                {
                    "uid": self._identity.uid,
                    "namespace": self._identity.namespace,
                    "name": self._identity.name,
                    "madeBucket": made_bucket,
                }
            )
            options = WriteOptions(content_type="application/json", if_none_match=True)
            try:
                store.put(self._marker, body.encode(), options)
            except AlreadyExists:
                return self._owner(store)
            return Owner.THIS
        return self._owner(store)

    def _owner(self, store: BlockingStore) -> Owner:
        mark = self._read(store)
        if mark is None:
            return Owner.NOBODY
        return Owner.THIS if mark.uid == self._identity.uid else Owner.OTHER

    def _read(self, store: BlockingStore) -> _Mark | None:
        """Return the marker; None if there is none, or one that we did not write. Errors: StoreError."""
        try:
            body, _ = store.get(self._marker, byte_range=ByteRange(0, MARK_BYTES))
            document = json.loads(bytes(body))
            return _Mark(uid=str(document["uid"]), made_bucket=document["madeBucket"] is True)
        except NotFound:
            return None
        except (ValueError, KeyError, TypeError):
            return None

    def _delete(self, store: BlockingStore, go_on: Callable[[], bool], mark: _Mark) -> Released:
        removed = 0
        for listed in _pages(store, self._location.prefix):
            if not go_on():
                return Released(done=False, message=f"removing the data of {self._where()}: {removed} objects so far")
            keys = [each.key for each in listed if each.key != self._marker]
            for error in store.delete_many(keys) if keys else []:
                raise error
            removed += len(keys)
        while uploads := store.pending_uploads(self._location.prefix):
            for upload in uploads:
                if not go_on():
                    return Released(done=False, message=f"ending unfinished uploads to {self._where()}")
                store.abort_upload(upload.key, upload.upload_id)
        # The marker is removed last, so that after an interruption the next call still finds it and continues.
        store.delete(self._marker)
        if mark.made_bucket and not self._location.prefix:
            remove_bucket(self._location)
        return Released(done=True, message=f"the data of {self._where()} was removed (reclaimPolicy Delete)")

    def _archive(self, store: BlockingStore, go_on: Callable[[], bool]) -> Released:
        prefix = self._location.prefix
        target = f"{prefix.removesuffix('/')}.archived-{self._identity.uid}/".removeprefix(".")
        moved = 0
        for listed in _pages(store, prefix):
            for each in listed:
                # A whole bucket is archived into a prefix of its own, below which everything has been moved already.
                if each.key == self._marker or each.key.startswith(target):
                    continue
                if not go_on():
                    return Released(done=False, message=f"archiving {self._where()}: {moved} objects so far")
                copy(store, each, target + each.key.removeprefix(prefix), self._limits)
                store.delete(each.key)
                moved += 1
        store.delete(self._marker)
        there = replace(self._location, prefix=target)
        return Released(done=True, message=f"{self._where()} was renamed to s3://{there.bucket}/{there.prefix}")

    def _where(self) -> str:
        return f"s3://{self._location.bucket}/{self._location.prefix}"


def _pages(store: BlockingStore, prefix: str) -> Iterator[Sequence[ListedObject]]:
    """Yield page by page. start_after, not a token: listed objects may be gone when the next page is requested."""
    last = ""
    while True:
        page = store.list_page(prefix, start_after=last, max_keys=PAGE_KEYS)
        yield page.objects
        if page.next_token is None or not page.objects:
            return
        last = page.objects[-1].key


def _count(listed: Sequence[ListedObject]) -> Measured:
    """Count only what users stored: no markers or test objects of this or another Datastore in the same bucket."""
    counted = [each for each in listed if each.key.rpartition("/")[2] != MARKER and f"/{PROBE}" not in f"/{each.key}"]
    return Measured(objects=len(counted), size_bytes=sum(each.size for each in counted))
