"""Carries TCP connections from this machine's loopback into a cluster's network namespace, or the other way.

A socket stays in the namespace in which it was made. So the listening one is made in the first namespace, and then this
process moves to the second, in which it connects. It ends when the cluster's first process does.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import socket
import sys

from datastore.linuxfds import pidfd

CLONE_NEWNET = 0x40000000
CHUNK_BYTES = 256 * 1024
CONNECT_TIMEOUT_S = 60.0
BACKLOG = 256


def enter_network(path: str) -> None:
    """Move this thread into the network namespace of `path` (/proc/PID/ns/net). Errors: OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(path, "rb") as namespace:
        if libc.setns(namespace.fileno(), CLONE_NEWNET) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), path)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while chunk := await reader.read(CHUNK_BYTES):
        writer.write(chunk)
        await writer.drain()
    if writer.can_write_eof():
        writer.write_eof()


async def _carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, target: tuple[str, int]) -> None:
    with contextlib.suppress(OSError, TimeoutError):
        opening = asyncio.open_connection(*target, limit=CHUNK_BYTES)
        far_reader, far_writer = await asyncio.wait_for(opening, CONNECT_TIMEOUT_S)
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(_copy(reader, far_writer))
                both.create_task(_copy(far_reader, writer))
        except* OSError:
            pass
        finally:
            far_writer.close()
    writer.close()


async def serve(listener: socket.socket, target: tuple[str, int], init_pid: int) -> None:
    """Carry connections until the process `init_pid` ends or SIGTERM comes."""
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    watched = pidfd(init_pid)
    loop.add_reader(watched, ended.set)
    loop.add_signal_handler(signal.SIGTERM, ended.set)

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await _carry(reader, writer, target)

    server = await asyncio.start_server(connected, sock=listener, limit=CHUNK_BYTES)
    await ended.wait()
    server.close()
    # Connections that are open end with this process.
    os._exit(0)


def main(init_pid: int, direction: str, port: int, target: tuple[str, int]) -> None:
    """Carry until the end. direction 'in': `port` is a descriptor that listens outside already, and target is inside;
    'out': listen inside on the port of every address, and target is outside."""
    inside = f"/proc/{init_pid}/ns/net"
    if direction == "in":
        listener = socket.socket(fileno=port)
        enter_network(inside)
    else:
        with open("/proc/self/ns/net", "rb") as outside:
            enter_network(inside)
            listener = socket.create_server(("", port), backlog=BACKLOG)
            enter_network(f"/proc/self/fd/{outside.fileno()}")
    print("ready", flush=True)
    asyncio.run(serve(listener, target, init_pid))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), (sys.argv[4], int(sys.argv[5])))
