"""Small S3 servers of somebody who means harm: they redirect, never end, drip, are silent, lie, and talk rubbish.

`with hostile(attack) as server:` listens on a free port of 127.0.0.1; `server.endpoint` goes into a location or a
manifest. ATTACKS holds one of each kind by name, for tests that have all of them at once. Each request is handled by
a thread that ends with the block, and costs next to no memory, so that what a test measures is ours.
"""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from email.utils import formatdate

from tests.unit.store.scripted import content_length, received

ETAG = "0123456789abcdef0123456789abcdef"
DATE = formatdate(usegmt=True)
DRIP_S = 0.05
_BLOCK = b"x" * (64 << 10)


class Gone(Exception):
    """The client hung up, or the test is over."""


@dataclass(slots=True)
class Talk:
    """One request on one connection. head: its first line and headers."""

    head: bytes
    connection: socket.socket
    over: threading.Event

    @property
    def target(self) -> bytes:
        """Path and query."""
        return self.head.split(b" ", 2)[1]

    @property
    def method(self) -> bytes:
        """GET, HEAD ..."""
        return self.head.split(b" ", 1)[0]

    @property
    def is_listing(self) -> bool:
        """A ListObjectsV2."""
        return b"list-type=2" in self.target

    def send(self, data: bytes) -> None:
        """Errors: Gone."""
        if self.over.is_set():
            raise Gone
        try:
            self.connection.sendall(data)
        except OSError as error:
            raise Gone from error

    def drip(self, data: bytes) -> None:
        """A byte at a time, each soon enough for who only looks at the time between two. Errors: Gone."""
        for at in range(len(data)):
            self.send(data[at : at + 1])
            if self.over.wait(DRIP_S):
                raise Gone

    def wait(self) -> None:
        """Say nothing until the end. Errors: Gone."""
        self.over.wait()
        raise Gone

    def answer(self, status: int, body: bytes = b"", *headers: str) -> None:
        """A whole answer. Errors: Gone."""
        self.send(head_of(status, f"Content-Length: {len(body)}", *headers) + (b"" if self.method == b"HEAD" else body))


Attack = Callable[[Talk], None]
"""What a server does with a request. Errors: Gone, which ends the connection."""


def head_of(status: int, *headers: str) -> bytes:
    """Status line and headers with their end."""
    return "\r\n".join([f"HTTP/1.1 {status} X", f"Date: {formatdate(usegmt=True)}", *headers, "", ""]).encode("latin-1")


def entry(key: str = "file", size: object = 10, etag: str = ETAG) -> bytes:
    """One object of a listing."""
    return (
        f"<Contents><Key>{key}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified><ETag>{etag}</ETag>"
        f"<Size>{size}</Size><StorageClass>STANDARD</StorageClass></Contents>"
    ).encode()


def listing(*entries: bytes, token: str = "") -> bytes:
    """A page of a listing. token: of the next page."""
    more = f"<IsTruncated>true</IsTruncated><NextContinuationToken>{token}</NextContinuationToken>".encode()
    return b"".join(
        [
            b'<?xml version="1.0" encoding="UTF-8"?><ListBucketResult><EncodingType>url</EncodingType>',
            more if token else b"<IsTruncated>false</IsTruncated>",
            *entries,
            b"</ListBucketResult>",
        ]
    )


def refusal(code: str, message: str) -> bytes:
    """An error as S3 writes it."""
    return f"<Error><Code>{code}</Code><Message>{message}</Message></Error>".encode()


# -- where a request is sent


def redirecting(to: str, status: int = 302) -> Attack:
    """An object that is listed, and whose bytes are said to be elsewhere."""

    def attack(talk: Talk) -> None:
        if talk.is_listing:
            talk.answer(200, listing(entry()))
        elif talk.method == b"HEAD":
            talk.send(head_of(200, "Content-Length: 10", f'ETag: "{ETAG}"', f"Last-Modified: {DATE}"))
        else:
            talk.answer(status, b"", f"Location: {to}")

    return attack


def region_named(name: str) -> Attack:
    """The bucket is said to be in a region of this name."""
    body = f"<Error><Code>PermanentRedirect</Code><Message>m</Message><Region>{name}</Region></Error>".encode()

    def attack(talk: Talk) -> None:
        talk.answer(301, body, f"x-amz-bucket-region: {name}", "Location: http://127.0.0.1:1/")

    return attack


# -- kinds of them


def answering(status: int, body: bytes, *headers: str) -> Attack:
    """Each request gets this whole answer."""
    return lambda talk: talk.answer(status, body, *headers)


def forever(said: bytes, again: bytes) -> Attack:
    """Something, and then something else without an end."""

    def attack(talk: Talk) -> None:
        talk.send(said)
        while True:
            talk.send(again)

    return attack


def dripping(said: bytes, slowly: bytes) -> Attack:
    """Something, and then something else byte by byte."""

    def attack(talk: Talk) -> None:
        talk.send(said)
        talk.drip(slowly)

    return attack


def endless_body(size: int, head: bytes, *, of_listings: bool = False) -> Attack:
    """An object that is listed with a size, and whose body has no end. of_listings: nor has that of a listing."""

    def attack(talk: Talk) -> None:
        if talk.is_listing:
            talk.answer(200, listing(entry(size=size)))
        if of_listings or not talk.is_listing:
            forever(head, _BLOCK)(talk)

    return attack


def endless_pages(talk: Talk) -> None:
    """Each page of a listing has another one behind it."""
    talk.answer(200, listing(*(entry(f"{time.monotonic_ns()}-{n}") for n in range(1000)), token=str(time.time_ns())))


def impossible_sizes(talk: Talk) -> None:
    """Sizes that no object has."""
    sizes = ["-5", "1e9", "9" * 5000, "0x10", "٣", ""]
    if talk.is_listing:
        talk.answer(200, listing(*(entry(str(number), size) for number, size in enumerate(sizes))))
    elif talk.method == b"HEAD":
        talk.send(b"HTTP/1.1 200 X\r\nContent-Length: %b\r\n\r\n" % random.choice(sizes).encode())
    else:
        talk.send(b"HTTP/1.1 206 X\r\nContent-Range: bytes 0-1/*\r\nContent-Length: 2\r\n\r\nab")


def garbage(talk: Talk) -> None:
    """No HTTP at all."""
    talk.send(random.Random(1).randbytes(100_000))
    raise Gone


def chunks_of_one(body: bytes) -> bytes:
    """Each byte is a chunk."""
    return b"".join(b"1\r\n%c\r\n" % byte for byte in body)


def document(inside: bytes, attributes: bytes = b"") -> Attack:
    """Each request gets this listing."""
    return answering(200, b"<ListBucketResult%b>%b</ListBucketResult>" % (attributes, inside))


page = answering(200, b"<html><body>Log in here</body></html>", "Content-Type: text/html")
"""As a captive portal has it."""
_OK = b"HTTP/1.1 200 OK\r\n"
_PADDING = b"X-Padding: %b\r\n" % _BLOCK[:1000]
_CHUNKED = head_of(200, "Transfer-Encoding: chunked")
_LISTED = listing(*[entry() for _ in range(300)])
_LONG = "x" * 20_000
_ENTITIES = "".join(f'<!ENTITY e{n} "{f"&e{n - 1};" * 10}">' for n in range(1, 8))


def _chunk(body: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(body), body)


ATTACKS: Mapping[str, Attack] = {
    "redirecting": redirecting("http://127.0.0.1:9/latest/meta-data/"),
    "other-region": region_named("eu-west-3"),
    "region-of-rubbish": region_named("x.evil.example/"),
    # Without an end: a page, many pages, a body, the head, one header, interim answers, a chunk's size, a trailer.
    "endless-listing": forever(
        _CHUNKED + _chunk(listing().removesuffix(b"</ListBucketResult>")), _chunk(entry() * 300)
    ),
    "endless-pages": endless_pages,
    "endless-object": endless_body(1 << 40, head_of(200), of_listings=True),
    "endless-headers": forever(_OK, _PADDING),
    "endless-line": forever(_OK + b"X-Padding: ", _BLOCK),
    "endless-interim": forever(b"", head_of(100) * 100),
    "endless-chunk-line": forever(_CHUNKED + b"1;", _BLOCK),
    "endless-trailers": forever(_CHUNKED + b"0\r\n", _PADDING),
    # Much to read: a listing in chunks of one byte, 3 MB of reasons, reasons without an end.
    "single-bytes": lambda talk: talk.send(_CHUNKED + chunks_of_one(listing(*[entry()] * 4000)) + b"0\r\n\r\n"),
    "long-refusal": answering(403, refusal("AccessDenied", "no " * (1 << 20))),
    "long-chunked-refusal": forever(head_of(403, "Transfer-Encoding: chunked"), _chunk(_BLOCK)),
    # Slowly, or not at all.
    "silent": Talk.wait,
    "dripping-head": dripping(b"", _OK + b"X-Padding: " + b"x" * 60_000),
    "dripping-listing": dripping(head_of(200, f"Content-Length: {len(_LISTED)}"), _LISTED),
    "dripping-chunks": dripping(_CHUNKED, chunks_of_one(_LISTED)),
    "dripping-refusal": dripping(head_of(403, "Content-Length: 60000"), b"x" * 60_000),
    # Lies: a body of 1 TB for an object of 10 bytes or for any range, and many more objects than were asked for.
    "lying-length": endless_body(
        10, head_of(206, f"Content-Length: {1 << 40}", "Content-Range: bytes 0-9/10", f'ETag: "{ETAG}"')
    ),
    "whole-in-place-of-range": endless_body(1 << 40, head_of(200, f"Content-Length: {1 << 40}", f'ETag: "{ETAG}"')),
    "impossible-sizes": impossible_sizes,
    "many-objects": answering(200, listing(*[entry("k")] * 20_000)),
    # Rubbish.
    "garbage": garbage,
    "garbage-xml": answering(200, random.Random(2).randbytes(50_000)),
    "page": page,
    # Small documents that are large trees, deep ones, have a namespace in each name, entities of entities (in UTF-16,
    # in which no byte says <!DOCTYPE), or a date, an id and a region of 20 KB each.
    "many-elements": document(b"<a/>" * 1_000_000),
    "deep-elements": answering(200, b"<ListBucketResult>" + b"<a>" * 20_000),
    "many-attributes": document(b"", b"".join(b' a%x=""' % number for number in range(100_000))),
    "long-namespaces": document(
        b"".join(b"<p:a%x/>" % number for number in range(500)), b' xmlns="" xmlns:p="%b"' % (b"u" * 50_000)
    ),
    "entities": answering(
        200,
        f'<!DOCTYPE r [<!ENTITY e0 "xxxxxxxxxx">{_ENTITIES}]><ListBucketResult>&e7;</ListBucketResult>'.encode(
            "utf-16"
        ),
    ),
    "long-names": answering(403, refusal(_LONG, _LONG), f"x-amz-request-id: {_LONG}", f"x-amz-bucket-region: {_LONG}"),
}
SLOW = frozenset({"silent", "dripping-head", "dripping-listing", "dripping-chunks", "dripping-refusal"})
"""Those by which a call ends only when its time is over."""


@dataclass(slots=True)
class Hostile:
    """A server that runs. heads: of the requests that came."""

    port: int
    heads: list[bytes] = field(default_factory=list)
    host: str = "127.0.0.1"

    @property
    def endpoint(self) -> str:
        """For a location or a manifest."""
        return f"http://{self.host}:{self.port}"


@contextmanager
def hostile(attack: Attack, host: str = "127.0.0.1") -> Iterator[Hostile]:
    """Serve by an attack while the block runs."""
    over = threading.Event()
    connections: list[socket.socket] = []

    def converse(connection: socket.socket) -> None:
        with connection, suppress(Gone, OSError):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 256 << 10)
            pending = b""
            while not over.is_set():
                while b"\r\n\r\n" not in pending:
                    pending += received(connection)
                head, _, pending = pending.partition(b"\r\n\r\n")
                length = content_length(head)
                while len(pending) < length:
                    pending += received(connection)
                pending = pending[length:]
                server.heads.append(head)
                attack(Talk(head, connection, over))

    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            connections.append(connection)
            threading.Thread(target=converse, args=(connection,), daemon=True).start()

    with socket.create_server((host, 0), backlog=128) as listener:
        server = Hostile(listener.getsockname()[1], host=host)
        threading.Thread(target=accept, daemon=True).start()
        try:
            yield server
        finally:
            over.set()
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            for connection in connections:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
