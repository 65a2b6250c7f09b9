"""A TCP relay that makes a server seem farther away: `python -m bench.distance PORT RTT_MS` listens on its own port.

Distance costs a client round trips and limits the bytes in flight: a new connection waits a round trip before its
first byte passes, every byte takes half a round trip, and at most WINDOW bytes of a connection are in flight in one
direction. The bandwidth is not limited otherwise.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from urllib.parse import urlsplit

from bench.processes import child, wait_for
from tests.servers import Server

WINDOW = 4 << 20
"""Bytes; Linux lets a receive buffer grow to about this size (tcp_rmem: 6 MiB, part of which is overhead)."""
LISTENING = re.compile(r"listening on (\d+)")
START_TIMEOUT_S = 60.0


class Side(asyncio.Protocol):
    """One side of a relayed connection: the other side sends what this one receives, `delay` seconds later."""

    def __init__(self, delay: float) -> None:
        self._delay = delay
        self._open_from = 0.0
        self._transport: asyncio.Transport | None = None
        self._other: Side | None = None
        self._under_way: deque[tuple[float, bytes]] = deque()
        self._bytes = 0
        self._timer: asyncio.TimerHandle | None = None

    def join(self, other: Side) -> None:
        """Relay between both sides from now on; the first byte passes after a round trip, as after a handshake."""
        loop = asyncio.get_running_loop()
        for one, far in ((self, other), (other, self)):
            one._other = far
            one._open_from = loop.time() + 2 * self._delay
            one._forward()

    def refuse(self) -> None:
        """Abort the connection, because the server cannot be reached."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport. asyncio calls this."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Queue the data. asyncio calls this. WINDOW bytes in flight stop the sender, as a full TCP window does."""
        self._append(data)
        if self._bytes >= WINDOW and self._transport is not None:
            self._transport.pause_reading()

    def connection_lost(self, _error: Exception | None) -> None:
        """Queue the end. asyncio calls this, also at EOF. The other side closes after all earlier data has arrived."""
        self._transport = None
        self._append(b"")

    def _append(self, data: bytes) -> None:
        self._under_way.append((asyncio.get_running_loop().time() + self._delay, data))
        self._bytes += len(data)
        self._forward()

    def _forward(self) -> None:
        """Pass on the data that is due, and set a timer for the next."""
        loop = asyncio.get_running_loop()
        while self._other is not None and self._under_way:
            at = max(self._under_way[0][0], self._open_from)
            if at > loop.time():
                if self._timer is None:
                    self._timer = loop.call_at(at, self._wake)
                return
            self._arrive(self._under_way.popleft()[1])

    def _wake(self) -> None:
        self._timer = None
        self._forward()

    def _arrive(self, data: bytes) -> None:
        self._bytes -= len(data)
        far = self._other._transport if self._other is not None else None
        if far is not None:
            far.write(data) if data else far.close()
        if self._bytes < WINDOW and self._transport is not None:
            self._transport.resume_reading()


async def relay(port: int, rtt: float) -> None:
    """Relay connections to a local port until a signal ends the process. rtt: seconds."""
    loop = asyncio.get_running_loop()
    dialling: set[asyncio.Task[None]] = set()

    async def dial(near: Side) -> None:
        try:
            _, far = await loop.create_connection(lambda: Side(rtt / 2), "127.0.0.1", port)
        except OSError:
            near.refuse()
        else:
            near.join(far)

    def accept() -> Side:
        near = Side(rtt / 2)
        task = loop.create_task(dial(near))
        dialling.add(task)
        task.add_done_callback(dialling.discard)
        return near

    async with await loop.create_server(accept, "127.0.0.1", 0) as server:
        print(f"listening on {server.sockets[0].getsockname()[1]}", flush=True)
        await server.serve_forever()


@contextlib.contextmanager
def distant(server: Server, rtt_ms: float) -> Iterator[Server]:
    """Yield the same server behind a relay that adds rtt_ms milliseconds of round trip. Errors: NotReady."""
    port = urlsplit(server.endpoint).port
    with child([sys.executable, "-m", "bench.distance", str(port), str(rtt_ms)]) as process:

        def found() -> bool:
            process.alive()
            return LISTENING.search(process.log.read_text()) is not None

        wait_for(found, START_TIMEOUT_S, "the relay to the server")
        match = LISTENING.search(process.log.read_text())
        assert match is not None
        yield replace(server, endpoint=f"{urlsplit(server.endpoint).scheme}://127.0.0.1:{match[1]}")


if __name__ == "__main__":
    asyncio.run(relay(int(sys.argv[1]), float(sys.argv[2]) / 1000))
