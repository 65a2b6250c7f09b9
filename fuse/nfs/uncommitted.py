"""The writes to a file that the server has taken but not committed to its disk; the mount keeps them until then.

A server may hold writes in its memory until COMMIT (RFC 1813, 3.3.7 and 3.3.21), and loses them if it restarts before.
The mount sees that by the server's verifier, which changes with each start; it then sends all kept writes again, in
their order, and a COMMIT. Writes to one file are sent one after the other, so that this order is the original one.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections.abc import Callable
from typing import NamedTuple, TypeVar

from datastore.errors import StoreError
from datastore.logs import fields

from ..ops import FSError
from . import calls
from .calls import Written
from .client import Client, Credentials

log = logging.getLogger(__name__)

T = TypeVar("T")
RESTARTS = 5
"""How often the server may restart while one file is committed."""


class _Write(NamedTuple):
    offset: int
    content: bytes
    verifier: int


class Uncommitted:
    """The uncommitted writes of one file. doubt: the verifier under which an earlier process may have written to it."""

    def __init__(self, handle: bytes, identity: Credentials, doubt: int | None = None) -> None:
        self.bytes = 0
        self.since = time.time()
        """When the oldest of the kept writes was made; for those of an earlier process, when this one began."""
        self.path = ""
        """The path of the file, for messages; '' if it is not known."""
        self.error = ""
        """Why settle() failed the last time; '' after a success."""
        self._connection = -1
        """The connection (its number in Client.reconnects) over which all kept writes were sent or last checked."""
        self._handle = handle
        self._identity = identity
        self._doubt = doubt
        self._lost = False
        self._writes: list[_Write] = []
        self._lock = threading.Lock()

    def __bool__(self) -> bool:
        """Return whether commit() has something to commit, or a loss to report."""
        # The lock is not taken, so the order matters: settle() sets _lost before it clears _doubt.
        return bool(self._writes) or self._doubt is not None or self._lost

    def unsure(self, client: Client) -> bool:
        """Return whether the server may have restarted and lost writes, so that it would answer with older content."""
        return bool(self._writes) and self._connection != client.reconnects

    @property
    def busy(self) -> bool:
        """Whether a write, a change of the size or a commit is under way."""
        return self._lock.locked()

    def write(self, client: Client, identity: Credentials, offset: int, content: bytes) -> Written:
        """Write in pieces as large as the server takes, and return the last answer. Errors: NFSError, StoreError."""
        with self._lock:
            self._identity = identity
            if not self._writes:
                self._connection, self.since = client.reconnects, time.time()
            return self._send(client, offset, content, self._add)

    def _add(self, taken: _Write) -> None:
        self._writes.append(taken)
        self.bytes += len(taken.content)

    def _send(self, client: Client, offset: int, content: bytes, add: Callable[[_Write], None]) -> Written:
        """Send bytes until the server has taken all. add: called with each piece that the server has only in memory."""
        _, size = client.sizes()
        pieces = [(offset + at, content[at : at + size]) for at in range(0, len(content), size)]
        while True:
            requests = [calls.write(self._handle, at, piece) for at, piece in pieces]
            answers = client.gather(requests, self._identity)
            rest = []
            for (at, piece), answer in zip(pieces, answers, strict=True):
                if not answer.stable:
                    add(_Write(at, piece[: answer.taken], answer.verifier))
                if answer.taken < len(piece):
                    rest.append((at + answer.taken, piece[answer.taken :]))
            if not rest:
                return answers[-1]
            if not any(answer.taken for answer in answers):
                raise FSError(errno.EIO, "the server takes no byte")
            pieces = rest

    def resize(self, change: Callable[[], T], size: int) -> T:
        """Set the file's size on the server by `change`; cut the kept writes too, as they may be sent again."""
        with self._lock:
            changed = change()
            cut = [each._replace(content=each.content[: max(0, size - each.offset)]) for each in self._writes]
            self._writes = [each for each in cut if each.content]
            self.bytes = sum(len(each.content) for each in self._writes)
            return changed

    def commit(self, client: Client) -> None:
        """Settle, then report a loss. Errors: as settle(); EIO, once, if writes of the earlier process may be lost."""
        self.settle(client)
        with self._lock:
            lost, self._lost = self._lost, False
        if lost:
            raise FSError(errno.EIO)

    def settle(self, client: Client) -> None:
        """Return when the server has all writes on disk. Errors: NFSError, StoreError; EIO if it keeps restarting."""
        try:
            self._settle(client)
        except (OSError, StoreError) as error:
            self.error = str(error)
            raise
        self.error = ""

    def _settle(self, client: Client) -> None:
        with self._lock:
            for _ in range(RESTARTS):
                if not self._writes and self._doubt is None:
                    return
                connection = client.reconnects
                verifier = client.call(calls.commit(self._handle), self._identity)
                if self._doubt is not None and verifier != self._doubt:
                    log.error("the host and the mount's process died within one write: what it had taken may be lost")
                    self._lost = True
                self._doubt = None
                if all(each.verifier == verifier for each in self._writes):
                    self._writes, self.bytes = [], 0
                else:
                    self._again(client)
                    self._connection = connection
            raise FSError(errno.EIO, "the server restarts again and again")

    def _again(self, client: Client) -> None:
        """Send all kept writes again after the server lost some: all, so that overlapping writes end in the same order.

        The kept writes stay in place until all are sent: a reader must see by unsure() that the server lacks some.
        """
        log.warning(
            "the server has restarted; what it had not committed is written again",
            extra=fields(writes=len(self._writes)),
        )
        again: list[_Write] = []
        for each in self._writes:
            self._send(client, each.offset, each.content, again.append)
        self._writes, self.bytes = again, sum(len(each.content) for each in again)
