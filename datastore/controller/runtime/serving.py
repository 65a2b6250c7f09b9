"""The HTTP server for /livez, /readyz and /metrics."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

CLIENTS = 64
"""Connections at a time. Every pod can reach the port, so one connection more closes the oldest one."""
METRICS_S = 1.0
"""The least seconds between two renderings of the metrics, which take the event loop's time."""


class Serving:
    """A small HTTP server. alive, ready: called at each request; refresh: sets gauges before they are read."""

    def __init__(self, alive: Callable[[], bool], ready: Callable[[], bool], refresh: Callable[[], None]) -> None:
        self._refresh = refresh
        app = web.Application()
        app.add_routes([web.get("/livez", _probe(alive)), web.get("/readyz", _probe(ready))])
        app.add_routes([web.get("/metrics", self._metrics)])
        self._runner = web.AppRunner(app, handle_signals=False, access_log=None, shutdown_timeout=1.0)
        self._listener: asyncio.Server | None = None
        self._made, self._made_at = b"", float("-inf")

    async def start(self, host: str, port: int) -> int:
        """Listen and return the port. Errors: OSError."""
        await self._runner.setup()
        self._listener = await asyncio.get_running_loop().create_server(self._client, host, port)
        return int(self._listener.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """Stop listening; idempotent."""
        if self._listener is not None:
            self._listener.close()
        await self._runner.cleanup()

    def _client(self) -> asyncio.BaseProtocol:
        server = self._runner.server
        assert server is not None, "setup() made it"
        for oldest in server.connections[: max(0, len(server.connections) - CLIENTS + 1)]:
            oldest.force_close()
        return server()

    async def _metrics(self, _: web.Request) -> web.Response:
        now = time.monotonic()
        if now - self._made_at >= METRICS_S:
            self._refresh()
            self._made, self._made_at = generate_latest(), now
        return web.Response(body=self._made, headers={"Content-Type": CONTENT_TYPE_LATEST})


def _probe(holds: Callable[[], bool]) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    async def answer(_: web.Request) -> web.Response:
        good = holds()
        return web.Response(status=200 if good else 503, text="ok\n" if good else "no\n")

    return answer
