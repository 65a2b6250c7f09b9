"""/livez, /readyz and /metrics."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest


class Serving:
    """A small HTTP server. alive, ready: asked at each request; refresh: sets gauges before they are read."""

    def __init__(self, alive: Callable[[], bool], ready: Callable[[], bool], refresh: Callable[[], None]) -> None:
        self._refresh = refresh
        app = web.Application()
        app.add_routes([web.get("/livez", _probe(alive)), web.get("/readyz", _probe(ready))])
        app.add_routes([web.get("/metrics", self._metrics)])
        self._runner = web.AppRunner(app, handle_signals=False, access_log=None, shutdown_timeout=1.0)

    async def start(self, host: str, port: int) -> int:
        """Listen; returns the port. Errors: OSError."""
        await self._runner.setup()
        site = web.TCPSite(self._runner, host, port)
        await site.start()
        return int(self._runner.addresses[0][1])

    async def close(self) -> None:
        """Stop listening; idempotent."""
        await self._runner.cleanup()

    async def _metrics(self, _: web.Request) -> web.Response:
        self._refresh()
        return web.Response(body=generate_latest(), headers={"Content-Type": CONTENT_TYPE_LATEST})


def _probe(holds: Callable[[], bool]) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    async def answer(_: web.Request) -> web.Response:
        good = holds()
        return web.Response(status=200 if good else 503, text="ok\n" if good else "no\n")

    return answer
