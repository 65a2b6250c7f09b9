"""Liveness, readiness and metrics over HTTP: GET /healthz, /readyz, /metrics. No dependency, a thread per request."""

from __future__ import annotations

import logging
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from datastore.errors import MountFailed

log = logging.getLogger(__name__)

CLIENT_TIMEOUT_S = 10.0
CLIENTS = 16
"""At a time. The port is open to every pod: who comes when there are as many takes the place of the oldest, so that
nobody who only holds connections keeps the kubelet away."""
TEXT = "text/plain; version=0.0.4; charset=utf-8"


class Bounded(ThreadingHTTPServer):
    """Serves CLIENTS at a time."""

    daemon_threads = True
    request_queue_size = 128
    """What the library has, 5, is full at once when many come: then the kernel lets the kubelet wait for seconds."""

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self._lock = threading.Lock()
        self._clients: dict[socket.socket, None] = {}
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """In a thread of its own."""
        with self._lock:
            oldest = next(iter(self._clients)) if len(self._clients) >= CLIENTS else None
            if oldest is not None:
                del self._clients[oldest]
                with suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)  # its thread ends by that
            self._clients[request] = None
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """The end of a connection."""
        with self._lock:
            self._clients.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that left, or had to, is no news."""
        if not isinstance(sys.exception(), OSError):
            log.exception("a page could not be made")


class HealthServer:
    """Listens on `port` of all addresses until stop(); port 0 does nothing."""

    def __init__(
        self,
        port: int,
        *,
        alive: Callable[[], bool] = lambda: True,
        ready: Callable[[], bool],
        metrics: Callable[[], str] = lambda: "",
    ) -> None:
        self._port = port
        self._pages: dict[str, Callable[[], tuple[int, str]]] = {
            "/healthz": lambda: _verdict(alive()),
            "/readyz": lambda: _verdict(ready()),
            "/metrics": lambda: (200, metrics()),
        }
        self._server: Bounded | None = None

    @property
    def port(self) -> int:
        """The port listened on; 0 when it is off."""
        return self._server.server_address[1] if self._server else 0

    def start(self) -> None:
        """Errors: MountFailed when the port is taken."""
        if not self._port:
            return
        pages = self._pages

        class Page(BaseHTTPRequestHandler):
            timeout = CLIENT_TIMEOUT_S

            def do_GET(self) -> None:
                page = pages.get(self.path.partition("?")[0])
                code, text = page() if page else (404, "not here\n")
                body = text.encode()
                self.send_response(code)
                self.send_header("Content-Type", TEXT)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """Probes come every few seconds; they are not news."""

        try:
            # A pod's own address is not known here, and the kubelet asks from outside the pod.
            self._server = Bounded(("", self._port), Page)
        except OSError as error:
            raise MountFailed(f"can't listen on port {self._port}: {error.strerror}") from error
        threading.Thread(target=self._server.serve_forever, name="health", daemon=True).start()

    def stop(self) -> None:
        """Idempotent."""
        server, self._server = self._server, None
        if server is not None:
            server.shutdown()
            server.server_close()


def _verdict(good: bool) -> tuple[int, str]:
    return (200, "ok\n") if good else (503, "not yet\n")
