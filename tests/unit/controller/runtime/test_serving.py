"""/livez, /readyz and /metrics, which every pod can ask."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from datastore.controller.runtime import serving
from datastore.controller.runtime.serving import CLIENTS, Serving
from tests.patience import PATIENCE_S
from tests.promises import promise


async def _ask(port: int, path: str) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
    answer = await asyncio.wait_for(reader.read(), PATIENCE_S)
    writer.close()
    return answer


@promise("S-212")
def test_a_client_that_holds_connections_does_not_block_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does whoever asks for metrics all the time."""
    monkeypatch.setattr(serving, "METRICS_S", PATIENCE_S)
    made: list[None] = []

    async def run() -> None:
        server = Serving(lambda: True, lambda: False, lambda: made.append(None))
        port = await server.start("127.0.0.1", 0)
        held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3 * CLIENTS)]
        assert (await _ask(port, "/livez")).startswith(b"HTTP/1.1 200")
        assert (await _ask(port, "/readyz")).startswith(b"HTTP/1.1 503")
        async with asyncio.timeout(PATIENCE_S):
            while sum(not reader.at_eof() for reader, _ in held) > CLIENTS:
                await asyncio.sleep(0.01)
        for _ in range(20):
            assert b"# HELP" in await _ask(port, "/metrics")
        assert len(made) == 1
        for _, writer in held:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()
        await server.close()

    asyncio.run(run())
