"""Liveness, readiness and metrics over HTTP: GET /healthz, /readyz, /metrics. Each request has a thread of its own."""

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
"""The most connections at a time. The port is open to every pod, so a new connection beyond this ends the oldest one:
a client that only holds connections can't lock the kubelet out."""
TEXT = "text/plain; version=0.0.4; charset=utf-8"


class Bounded(ThreadingHTTPServer):
    """An HTTP server with at most CLIENTS connections at a time."""

    daemon_threads = True
    request_queue_size = 128
    """The library's backlog of 5 fills up when many clients come; then the kernel delays the kubelet for seconds."""

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self._lock = threading.Lock()
        self._clients: dict[socket.socket, None] = {}
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve the connection in a thread of its own; end the oldest connection if there are too many."""
        with self._lock:
            oldest = next(iter(self._clients)) if len(self._clients) >= CLIENTS else None
            if oldest is not None:
                del self._clients[oldest]
                with suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)  # that ends its thread
            self._clients[request] = None
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._clients.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log errors, but not that a connection has ended."""
        if not isinstance(sys.exception(), OSError):
            log.exception("a page could not be made")


class HealthServer:
    """Serves the pages on `port` of all addresses until stop(); with port 0 there is no server."""

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
        """The port of the server; 0 when there is none."""
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
                """Log nothing, because the probes come every few seconds."""

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
