"""What a server has taken of a file and need not have on its disk: it is kept here until the server has committed it.

A server may keep writes in its memory until COMMIT (RFC 1813, 3.3.7 and 3.3.21). When it restarts in between they are
lost, which its verifier tells: it is another one after each start. Then everything that is kept is written again, in
its order, and committed. Writes to one file are sent one after the other, so that this order is the order they had.
"""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Callable
from typing import NamedTuple, TypeVar

from datastore.logs import fields

from ..ops import FSError
from . import calls
from .calls import Written
from .client import Client, Credentials

log = logging.getLogger(__name__)

T = TypeVar("T")
RESTARTS = 5
"""So often a server may restart while one file is committed."""


class _Write(NamedTuple):
    offset: int
    content: bytes
    verifier: int


class Uncommitted:
    """Of one file. doubt: the verifier that writes of a dead process of ours were taken under, None without any."""

    def __init__(self, handle: bytes, identity: Credentials, doubt: int | None = None) -> None:
        self.bytes = 0
        self._connection = -1
        """The connection (Client.reconnects) over which all of it was written, or that was asked whether it has it."""
        self._handle = handle
        self._identity = identity
        self._doubt = doubt
        self._lost = False
        self._writes: list[_Write] = []
        self._lock = threading.Lock()

    def __bool__(self) -> bool:
        """Whether anything is to be committed, or to be said."""
        # In this order, without the lock: who settles says what is lost before he drops the doubt.
        return bool(self._writes) or self._doubt is not None or self._lost

    def unsure(self, client: Client) -> bool:
        """Whether the server may have restarted since, so that its answers about this file may be of before."""
        return bool(self._writes) and self._connection != client.reconnects

    @property
    def busy(self) -> bool:
        """Whether a write, or a commit, is under way."""
        return self._lock.locked()

    def write(self, client: Client, identity: Credentials, offset: int, content: bytes) -> Written:
        """Write, in pieces as large as the server takes; the last answer. Errors: NFSError, StoreError."""
        with self._lock:
            self._identity = identity
            if not self._writes:
                self._connection = client.reconnects
            return self._send(client, offset, content, self._add)

    def _add(self, taken: _Write) -> None:
        self._writes.append(taken)
        self.bytes += len(taken.content)

    def _send(self, client: Client, offset: int, content: bytes, add: Callable[[_Write], None]) -> Written:
        """add: told of each piece that the server has only in its memory."""
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
        """Do what sets the file's size on the server; what is behind the new end must not come back."""
        with self._lock:
            changed = change()
            cut = [each._replace(content=each.content[: max(0, size - each.offset)]) for each in self._writes]
            self._writes = [each for each in cut if each.content]
            self.bytes = sum(len(each.content) for each in self._writes)
            return changed

    def commit(self, client: Client) -> None:
        """As settle(); then a program is told what it has to know.

        Errors: EIO once when a server lost what a dead process of ours had written.
        """
        self.settle(client)
        with self._lock:
            lost, self._lost = self._lost, False
        if lost:
            raise FSError(errno.EIO)

    def settle(self, client: Client) -> None:
        """Return when the server has everything on its disk. Errors: NFSError, StoreError."""
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
        """The server has lost some of it: write all, since what was written over something else has to be so again.

        Until all of it is there nothing is forgotten here: who reads meanwhile has to see that the server lacks some.
        """
        log.warning(
            "the server has restarted; what it had not committed is written again",
            extra=fields(writes=len(self._writes)),
        )
        again: list[_Write] = []
        for each in self._writes:
            self._send(client, each.offset, each.content, again.append)
        self._writes, self.bytes = again, sum(len(each.content) for each in again)
