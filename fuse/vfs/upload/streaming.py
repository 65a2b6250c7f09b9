"""Multipart uploads: side by side within bounds, and begun while a file is still being written (S-45).

What a sequential writer has left behind is sent from the staging file, so that its close sends only the tail. A part
that is changed after it was sent is sent again under its number before the upload is completed. Every upload is in the
journal from before it begins until it was completed or aborted: what a dead process left is found and dropped (S-46).

Threads: advance() is the loop's; finish() and abort() are a pool thread's; parts are io tasks. All but the tasks run
with node.lock held.
"""

from __future__ import annotations

import errno
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import NamedTuple

from datastore.errors import DatastoreError, DeadlineExceeded
from datastore.retry import carried

from ...data import multipart
from ...data.multipart import Part
from ...data.staging import StagedFile
from ...ops import FSError
from ...state.rows import UploadNote
from ...store.base import ByteRange, ETag, PartNumber, UploadId, WriteOptions, WriteResult
from ..tree.core import Core
from .copies import abort_upload

WIDTH = 8
"""Parts of a mount on their way at once: 64 MiB of memory while files are below 8 GiB, and what a fast line needs."""
REWRITES_MAX = 8
"""A file of which so many sent parts were changed again is not written in sequence: the rest waits for the close."""
_REQUEST_S, _BYTES_PER_S = 900.0, 64 << 10
"""A request is bounded by the store's own deadlines, and its repetitions by their budget: what takes longer than this,
and than its bytes may take, is lost."""
_LOOK_S = 1.0
"""How often who waits looks for lost ones."""


class Lanes:
    """Runs the requests of all uploads of a mount on io threads, `width` at once, in the order they came.

    One of which nothing is heard for too long fails with DeadlineExceeded, and another one takes its place.
    """

    def __init__(
        self,
        submit: Callable[[Callable[[], None]], object],
        clock: Callable[[], float] = time.monotonic,
        width: int = WIDTH,
    ) -> None:
        self._submit = submit
        self._clock = clock
        self._width = width
        self._lock = threading.Lock()
        self._waiting: deque[tuple[Future[ETag], Callable[[], ETag], int]] = deque()
        self._busy: dict[Future[ETag], float] = {}
        """Until when each may take."""

    def run(self, call: Callable[[], ETag], size: int = 0) -> Future[ETag]:
        """Queue a request that moves so many bytes; its future can be cancelled until it begins."""
        future: Future[ETag] = Future()
        with self._lock:
            self._waiting.append((future, call, size))
        self._pump()
        return future

    def wait(self, future: Future[ETag]) -> BaseException | None:
        """Why a request, or what stands for it, failed; None of one that did not."""
        while True:
            try:
                return future.exception(timeout=_LOOK_S)
            except TimeoutError:
                self._drop_lost()

    def _drop_lost(self) -> None:
        with self._lock:
            now = self._clock()
            lost = [future for future, deadline in self._busy.items() if deadline < now]
            for future in lost:
                del self._busy[future]
        for future in lost:
            future.set_exception(DeadlineExceeded("nothing was heard of a part of an upload for too long; try again"))
        self._pump()

    def _pump(self) -> None:
        while True:
            with self._lock:
                if len(self._busy) >= self._width or not self._waiting:
                    return
                future, call, size = self._waiting.popleft()
                if not future.set_running_or_notify_cancel():
                    continue
                self._busy[future] = self._clock() + _REQUEST_S + size / _BYTES_PER_S
            try:
                self._submit(partial(self._run, future, call))
            except RuntimeError as error:  # the mount ends
                if self._ended(future):
                    future.set_exception(error)

    def _run(self, future: Future[ETag], call: Callable[[], ETag]) -> None:
        try:
            etag = call()
        except BaseException as error:  # the one who waits for the part is told
            if self._ended(future):
                future.set_exception(error)
        else:
            if self._ended(future):
                future.set_result(etag)
        self._pump()

    def _ended(self, future: Future[ETag]) -> bool:
        """Make room for another; False when it was given up for lost."""
        with self._lock:
            return self._busy.pop(future, None) is not None


class _Sent(NamedTuple):
    byte_range: ByteRange
    etag: Future[ETag]


class Stream:
    """One multipart upload of a staging file.

    INVARIANT: a part counts as sent only while staged.streamed has its whole range: the range is put in before its
    bytes are read, and taken out by every later change of them.
    """

    def __init__(
        self, core: Core, lanes: Lanes, staged: StagedFile, key: str, options: WriteOptions, *, copies: bool
    ) -> None:
        self.key = key
        self.options = options
        self._copies = copies
        self._core = core
        self._store = core.store
        self._lanes = lanes
        self._staged = staged
        self._lock = threading.Lock()
        self._note: UploadNote | None = None
        self._id: UploadId | None = None
        self._waiting: list[Callable[[], None]] = []
        """Parts that were handed in before the upload had its id."""
        self._sent: dict[PartNumber, _Sent] = {}
        self._next = 1
        self._created: Future[ETag] | None = None
        self._dropped = False

    @property
    def failed(self) -> bool:
        """It could not be begun: another one has to be."""
        created = self._created
        return created is not None and created.done() and created.exception() is not None

    def begins(self) -> bool:
        """Wait for its beginning, where that is under way; False when it could not be begun: another one has to be."""
        return self._created is None or self._lanes.wait(self._created) is None

    # -- while the file is written

    def advance(self) -> int:
        """Send what the writer has left behind; the size of the file at which there may be more to send."""
        staged = self._staged
        while True:
            part = multipart.scheduled(self._next)
            due = part.byte_range.stop + multipart.PART_SIZE
            if staged.size < due or self.failed or not staged.dirty_ranges.contains(*part.byte_range):
                return due
            self._begin()
            self._send(part)
            self._next += 1

    def _begin(self) -> None:
        if self._created is None:
            self._created = self._lanes.run(carried(self._create))

    def _create(self) -> ETag:
        self._note = self._core.db.upload_begun(self.key, self._core.now_ns())
        upload_id = self._store.create_upload(self.key, self.options, copies=self._copies)
        self._core.db.upload_known(self._note, upload_id)
        with self._lock:
            self._id = upload_id
            waiting, self._waiting = self._waiting, []
        for start in waiting:
            start()
        return ETag("")

    def _send(self, part: Part, base: tuple[str, ETag] | None = None) -> None:
        """Hand a part in; base: the object and version that a copied part comes from."""
        done: Future[ETag] = Future()
        self._sent[part.number] = _Sent(part.byte_range, done)
        call = carried(partial(self._put, part) if base is None else partial(self._copy, part, *base))

        def start() -> None:
            size = part.byte_range.stop - part.byte_range.start
            self._lanes.run(call, size).add_done_callback(partial(_pass_on, done))

        with self._lock:
            if self._id is None:
                self._waiting.append(start)
                return
        start()

    def _put(self, part: Part) -> ETag:
        assert self._id is not None
        if self._dropped:
            raise FSError(errno.ECANCELED)
        with self._staged.part_for_stream(*part.byte_range) as body:
            return self._store.upload_part(self.key, self._id, part.number, body)

    def _copy(self, part: Part, source: str, etag: ETag) -> ETag:
        assert self._id is not None
        return self._store.upload_part_copy(self.key, self._id, part.number, source, part.byte_range, etag)

    # -- at the close

    def finish(
        self, parts: Sequence[Part], options: WriteOptions, fill: Callable[[ByteRange], None] = lambda _: None
    ) -> WriteResult:
        """Send what is not sent, and complete. DatastoreError; the upload is dropped then.

        options: the conditions. fill: fetches what the staging file lacks of a range. Nothing else changes that file
        meanwhile.
        """
        try:
            self._begin()
            fresh = {part.number for part in parts} - set(self._sent)
            for part in parts:
                if not part.copied:
                    fill(part.byte_range)
                if part.number in fresh:
                    self._send_from_base(part)
            self._wait()
            for part in parts:
                if part.number not in fresh and not self._is_sent(part):
                    self._send_from_base(part)
            done = [(part.number, self._result(part.number)) for part in parts]
            assert self._id is not None
            result = self._store.complete_upload(self.key, self._id, done, options)
        except (DatastoreError, OSError, RuntimeError):
            self.abort()
            raise
        if self._note is not None:
            self._core.db.upload_ended(self._note)
        return result

    def _send_from_base(self, part: Part) -> None:
        base = self._staged.base
        self._send(part, (base.key, base.etag) if part.copied and base is not None else None)

    def _is_sent(self, part: Part) -> bool:
        sent = self._sent.get(part.number)
        if sent is None or part.copied or sent.byte_range != part.byte_range:
            return False
        return sent.etag.exception() is None and self._staged.streamed.contains(*part.byte_range)

    def _wait(self) -> None:
        """Until nothing is under way: a part that is sent again must not be overtaken by its former self.

        One that was never sent need not wait for that.
        """
        assert self._created is not None
        error = self._lanes.wait(self._created)
        if error is not None:
            raise error
        for sent in list(self._sent.values()):
            self._lanes.wait(sent.etag)

    def _result(self, number: PartNumber) -> ETag:
        """A part's ETag. The first failure is raised when no sibling is at work any more."""
        etag = self._sent[number].etag
        error = self._lanes.wait(etag)
        if error is not None:
            self._wait()
            raise error
        return etag.result()

    def abort(self) -> None:
        """Drop the upload. What the store does not let us drop stays in the journal for the next start."""
        created = self._created
        if created is None or created.cancel():
            return
        if self._lanes.wait(created) is not None:
            # Whether it exists the next start finds out: the journal has its key.
            return
        self._dropped = True
        self._wait()
        if self._id is None or self._note is None:
            return
        abort_upload(self._core, self._note, self.key, self._id)


def _pass_on(target: Future[ETag], source: Future[ETag]) -> None:
    error = source.exception()
    if error is not None:
        target.set_exception(error)
    else:
        target.set_result(source.result())


class Streams:
    """The multipart uploads of a mount."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._lanes = Lanes(core.io.submit, core.clock.monotonic)

    def new(self, staged: StagedFile, key: str, options: WriteOptions, *, copies: bool = False) -> Stream:
        """An upload that is not begun yet. copies: some of its parts are the base's."""
        return Stream(self._core, self._lanes, staged, key, options, copies=copies)
