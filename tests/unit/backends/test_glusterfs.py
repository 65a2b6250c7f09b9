"""Whether a GlusterFS server has a volume; the servers answer, lie, send a byte at a time, or don't exist."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Iterator

import pytest

from datastore.api.source import GlusterFSLocation
from datastore.backends import glusterfs
from datastore.errors import NotFound, Unreachable
from tests.promises import promise

LAST = 1 << 31


@contextlib.contextmanager
def server(answer: Callable[[bytes], bytes]) -> Iterator[int]:
    """Yield the port of a server that answers each connection once."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listening.accept()
                    with connection:
                        call = connection.recv(1 << 16)
                        connection.sendall(answer(call))

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield listening.getsockname()[1]
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            thread.join()


def reply(call: bytes, *numbers: int) -> bytes:
    """Return an accepted reply to a call."""
    record = call[4:8] + struct.pack(">5I", 1, 0, 0, 0, 0) + struct.pack(f">{len(numbers)}i", *numbers)
    return struct.pack(">I", LAST | len(record)) + record


def find(port: int, *servers: str) -> str:
    return glusterfs.find(GlusterFSLocation(servers=servers or ("127.0.0.1",), volume="digits"), port)


@promise("S-309")
def test_a_server_that_has_the_volume_is_named_and_was_asked_for_it() -> None:
    """Unreachable servers are skipped."""
    asked: list[bytes] = []

    def answer(call: bytes) -> bytes:
        asked.append(call)
        whole = reply(call, 4, 0, 4)
        half = len(whole) // 2 - 4
        return (
            struct.pack(">I", half)
            + whole[4 : 4 + half]
            + struct.pack(">I", LAST | (len(whole) - 4 - half))
            + whole[4 + half :]
        )

    with server(answer) as port:
        assert find(port, "127.0.0.2", "127.0.0.1") == "127.0.0.1"
    program = struct.unpack_from(">3I", asked[0], 16)
    assert program == (14398633, 2, 2)
    assert struct.pack(">I", 6) + b"digits\0\0" in asked[0]


@promise("S-306")
def test_a_missing_volume_is_reported_by_the_first_server_that_answers() -> None:
    with server(lambda call: reply(call, -1, 2, 0)) as port, pytest.raises(NotFound, match="no volume digits"):
        find(port)


@promise("S-306")
@pytest.mark.parametrize("ports", [(0,), (0, 0), (0, 49152), (0, None)])
def test_a_volume_without_a_running_brick_is_reported_as_such(ports: tuple[int | None, ...]) -> None:
    """A brick whose host does not answer (None) may run, so then it is not reported."""
    parts = [
        f"volume v-{number}\n    option remote-subvolume /b{number}\n    option remote-host 127.0.0.1\nend-volume\n"
        for number in range(len(ports))
    ]
    volfile = "\n".join([*parts, "volume v\n    type cluster/distribute\n    subvolumes v-0\nend-volume\n"]).encode()

    def answer(call: bytes) -> bytes:
        if struct.unpack_from(">3I", call, 16) == (14398633, 2, 2):
            record = reply(call, 0, 0, len(volfile))[4:] + volfile + bytes(-len(volfile) % 4 + 4)
            return struct.pack(">I", LAST | len(record)) + record
        (found,) = (port for number, port in enumerate(ports) if b"/b%d" % number in call)
        return b"" if found is None else reply(call, 0 if found else -1, 0, 0, found)

    with server(answer) as port:
        if any(found != 0 for found in ports):
            assert find(port) == "127.0.0.1"
        else:
            with pytest.raises(NotFound, match="has the volume digits, but none of its bricks runs"):
                find(port)


@promise("S-306")
@pytest.mark.parametrize(
    "answer",
    [
        lambda _: b"",
        lambda _: b"SSH-2.0-OpenSSH_9.2\r\n" * 8,
        lambda call: reply(b"\0" * 8, 0, 0),
        lambda call: reply(call),
        lambda call: reply(call, -1, 13, 0),
        lambda _: struct.pack(">I", LAST | (1 << 30)),
        lambda _: struct.pack(">I", 0) * 100,
    ],
)
def test_an_invalid_answer_is_reported_with_its_server(answer: Callable[[bytes], bytes]) -> None:
    """This holds whatever it sends."""
    with server(answer) as port, pytest.raises(Unreachable, match=r"127\.0\.0\.1: "):
        find(port)


@promise("S-306")
def test_a_server_that_never_answers_costs_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same holds for a server that sends a byte now and then."""
    monkeypatch.setattr(glusterfs, "TIMEOUT_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(Unreachable, match="no answer in time"):
        find(silent.getsockname()[1])
    with server(lambda _: struct.pack(">I", 0) * 4_000_000) as port, pytest.raises(Unreachable):
        find(port)
