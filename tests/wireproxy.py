"""A proxy in front of an S3 server that spoils the answers to chosen requests, as networks and busy servers do.

It speaks HTTP/1.1 with keep-alive and passes requests on unchanged, Host included, so that signatures stay valid.
"""

from __future__ import annotations

import contextlib
import http.client
import re
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

from tests.servers import Server

UPSTREAM_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Spoilt:
    """How an answer is spoilt. status, code: an S3 error in its place; with status 0 it is spoilt as `way` says.

    before: the request never reaches the server. way: reset (connection reset), silence (no answer for stall_s),
    truncate (half of the body, then the end), etag (that of another version), damage (the answer stays, but one bit of
    the object that a PUT sends is changed).
    """

    name: str
    status: int = 0
    code: str = ""
    way: str = ""
    before: bool = True


KINDS = (
    Spoilt("reset before", way="reset"),
    Spoilt("reset after", way="reset", before=False),
    Spoilt("silence", way="silence", before=False),
    Spoilt("truncated", way="truncate", before=False),
    Spoilt("500", status=500, code="InternalError", before=False),
    Spoilt("503", status=503, code="SlowDown"),
    Spoilt("403", status=403, code="AccessDenied"),
    Spoilt("wrong etag", way="etag", before=False),
    Spoilt("damaged", way="damage", before=False),
)

Plan = Callable[[int], Spoilt | None]
"""(number of the request from 0) -> how its answer is spoilt, or None for not at all."""


def no_faults(_index: int) -> Spoilt | None:
    """The plan of a healthy network."""
    return None


class WireProxy:
    """requests: method and path of all requests so far. plan: may be replaced at any time."""

    def __init__(self, upstream: Server, stall_s: float) -> None:
        parts = urlsplit(upstream.endpoint)
        self.host, self.port = str(parts.hostname), int(parts.port or 80)
        self.stall_s = stall_s
        self.plan: Plan = no_faults
        self.requests: list[str] = []
        self.closing = threading.Event()
        self._lock = threading.Lock()
        self.endpoint = ""

    def next(self, what: str) -> Spoilt | None:
        """Count a request and return how its answer is spoilt."""
        with self._lock:
            self.requests.append(what)
            return self.plan(len(self.requests) - 1)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = UPSTREAM_TIMEOUT_S
    proxy: WireProxy

    def setup(self) -> None:
        super().setup()
        self._upstream = http.client.HTTPConnection(self.proxy.host, self.proxy.port, timeout=UPSTREAM_TIMEOUT_S)

    def finish(self) -> None:
        self._upstream.close()
        with contextlib.suppress(OSError):
            super().finish()

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""

    def handle(self) -> None:
        with contextlib.suppress(ConnectionError, TimeoutError, BrokenPipeError):
            super().handle()

    def _pass(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length) if length else b""
        spoilt = self.proxy.next(f"{self.command} {self.path}")
        if spoilt is not None and spoilt.before:
            self._spoil(spoilt, b"", b"")
            return
        damage = spoilt is not None and spoilt.way == "damage"
        head, answer = self._forward(_damaged(body) if damage and self.command == "PUT" else body)
        if spoilt is not None and not damage:
            self._spoil(spoilt, head, answer)
        else:
            self.wfile.write(head + answer)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _pass  # noqa: N815  http.server looks for these names

    def _forward(self, body: bytes) -> tuple[bytes, bytes]:
        self._upstream.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
        for name, content in self.headers.items():
            self._upstream.putheader(name, content)
        self._upstream.endheaders(body)
        answer = self._upstream.getresponse()
        received = answer.read()
        skipped = {"transfer-encoding", "connection", "content-length"}
        lines = [f"HTTP/1.1 {answer.status} {answer.reason}"]
        lines += [f"{name}: {text}" for name, text in answer.getheaders() if name.lower() not in skipped]
        length = answer.getheader("Content-Length") if self.command == "HEAD" else str(len(received))
        if length is not None:
            lines.append(f"Content-Length: {length}")
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1"), received

    def _spoil(self, spoilt: Spoilt, head: bytes, answer: bytes) -> None:
        if spoilt.status:
            text = f"<Error><Code>{spoilt.code}</Code><Message>spoilt</Message></Error>".encode()
            line = f"HTTP/1.1 {spoilt.status} X\r\nContent-Length: {len(text)}\r\n\r\n".encode()
            self.wfile.write(line + (b"" if self.command == "HEAD" else text))
            return
        if spoilt.way == "etag":
            self.wfile.write(re.sub(rb'(?i)(\r\netag: "?)[^"\r]*', rb"\g<1>" + b"0" * 32, head) + answer)
            return
        self.close_connection = True
        if spoilt.way == "truncate":
            self.wfile.write(head + answer[: len(answer) // 2] if answer else head[: len(head) // 2])
            self.wfile.flush()
        elif spoilt.way == "silence":
            self.proxy.closing.wait(self.proxy.stall_s)
        else:
            # with a linger time of 0, close() sends a RST
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()


def _damaged(body: bytes) -> bytes:
    middle = len(body) // 2
    return body[:middle] + bytes([body[middle] ^ 1]) + body[middle + 1 :] if body else body


@contextlib.contextmanager
def wire_proxy(upstream: Server, stall_s: float) -> Iterator[WireProxy]:
    """Run a proxy on a free port while the block runs."""
    proxy = WireProxy(upstream, stall_s)

    class Handler(_Handler):
        pass

    Handler.proxy = proxy

    class Listener(ThreadingHTTPServer):
        daemon_threads = True
        block_on_close = False
        request_queue_size = 128

        def handle_error(self, request: object, client_address: object) -> None:
            """Do nothing: connections are broken on purpose."""

    with Listener(("127.0.0.1", 0), Handler) as listener:
        proxy.endpoint = f"http://127.0.0.1:{listener.server_address[1]}"
        thread = threading.Thread(target=listener.serve_forever, args=(0.05,), name="wire-proxy")
        thread.start()
        try:
            yield proxy
        finally:
            proxy.closing.set()
            listener.shutdown()
            thread.join(10)
