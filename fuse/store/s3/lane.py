"""One connection on which requests without bodies are sent, one or several at once, and answered, without waiting."""

from __future__ import annotations

import http.client
import ssl
from collections.abc import Sequence

from .http1 import NOT_NOW, has_nothing, heard
from .messages import Answer

_RECEIVED_BYTES = 256 << 10
_RECORD_BYTES = 16 << 10
"""What TLS hands out at once; asking for more costs the clearing of that."""
_HELD_MAX_BYTES = 4 << 20
"""Far more than the answers to a window."""


class Lane:
    """Sends a window: HEADs that follow each other before the first is answered. One thread.

    INVARIANT answers are those to the first of window, in order.
    """

    __slots__ = (
        "_at", "_held", "_secure", "_sock", "answers", "connection", "ended", "first_at", "heard_at", "kept", "lasts",
        "sent_at", "unsent", "window",
    )  # fmt: skip

    def __init__(self, connection: http.client.HTTPConnection, *, kept: bool) -> None:
        """kept: it lay idle, so the server may have given it up."""
        self.connection = connection
        self.kept = kept
        """The same, as long as nothing came since."""
        self._sock = connection.sock
        self._sock.setblocking(False)
        self._secure = isinstance(self._sock, ssl.SSLSocket)
        self._held = b""
        self._at = 0
        self.window: Sequence[int] = ()
        self.answers: list[Answer] = []
        self.unsent = b""
        self.lasts = True
        """The server has not said that it will hang up."""
        self.ended = False
        """It has hung up."""
        self.sent_at = self.first_at = self.heard_at = 0.0
        """first_at: of the first answer to the window."""

    def fileno(self) -> int:
        """Of its socket."""
        return self._sock.fileno()

    def begin(self, window: Sequence[int], requests: bytes, now: float) -> None:
        """Send a window: numbers that the caller knows its requests by. Errors: OSError."""
        self.window, self.unsent = window, requests
        self.answers = []
        self.sent_at = self.heard_at = now
        self._held, self._at = b"", 0
        self.send()

    def over(self) -> None:
        """The window is done with; the server may give the connection up from now on."""
        self.window, self.kept = (), True

    def send(self) -> None:
        """As much as can be sent now. Errors: OSError."""
        try:
            self.unsent = self.unsent[self._sock.send(self.unsent) :]
        except NOT_NOW:
            return

    def receive(self, now: float) -> None:
        """What has come; reads the answers that are whole. Errors: OSError, HTTPException."""
        while not self.ended:
            try:
                piece = self._sock.recv(_RECORD_BYTES if self._secure else _RECEIVED_BYTES)
            except NOT_NOW:
                break
            self.ended = not piece
            self._held += piece
            self.kept, self.heard_at = self.kept and self.ended, now
            if len(self._held) > _HELD_MAX_BYTES:
                raise http.client.HTTPException("far more than was asked for")
            if not self._secure:  # poll() tells of the rest; of what TLS holds it does not
                break
        waiting = not self.answers
        self._read()
        if waiting:
            self.first_at = now

    def _read(self) -> None:
        while len(self.answers) < len(self.window):
            head = heard(self._held, self._at)
            if head is None:
                return
            self._at = head.end
            if head.status >= 200 or head.status == http.client.SWITCHING_PROTOCOLS:
                self.answers.append(Answer(head.status, head.fields, b""))
                self.lasts = self.lasts and head.goes_on
            elif len(self.window) > 1:
                raise http.client.HTTPException("an interim answer to one of several requests")

    @property
    def is_answered(self) -> bool:
        """Every request of the window."""
        return len(self.answers) == len(self.window)

    @property
    def is_exact(self) -> bool:
        """All was sent, nothing came but the answers, and the connection can be used again."""
        return self._at == len(self._held) and self.lasts and not self.ended and not self.unsent

    def is_quiet(self) -> bool:
        """Nothing has come that nobody asked for. What it reads of that is lost."""
        return has_nothing(self._sock)
