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
    return "\r\n".join([f"HTTP/1.1 {status} X", f"Date: {DATE}", *headers, "", ""]).encode("latin-1")


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


# -- without an end


def endless_listing(talk: Talk) -> None:
    """A chunked page with objects without end."""
    talk.send(head_of(200, "Transfer-Encoding: chunked"))
    block = listing().removesuffix(b"</ListBucketResult>")
    while True:
        talk.send(b"%x\r\n%b\r\n" % (len(block), block))
        block = entry() * 300


def endless_pages(talk: Talk) -> None:
    """Each page of a listing has another one behind it."""
    talk.answer(200, listing(*(entry(f"{time.monotonic_ns()}-{n}") for n in range(1000)), token=str(time.time_ns())))


def endless_object(talk: Talk) -> None:
    """A body without a length, whatever was asked for."""
    if talk.is_listing:
        talk.answer(200, listing(entry(size=1 << 40)))
    talk.send(head_of(200))
    while True:
        talk.send(_BLOCK)


def endless_headers(talk: Talk) -> None:
    """The head has no end."""
    talk.send(b"HTTP/1.1 200 OK\r\n")
    while True:
        talk.send(b"X-Padding: %b\r\n" % _BLOCK[:1000])


def endless_line(talk: Talk) -> None:
    """One header has no end."""
    talk.send(b"HTTP/1.1 200 OK\r\nX-Padding: ")
    while True:
        talk.send(_BLOCK)


def endless_interim(talk: Talk) -> None:
    """Interim answers, and never the final one."""
    while True:
        talk.send(head_of(100) * 100)


def endless_chunk_line(talk: Talk) -> None:
    """The size of a chunk has no end."""
    talk.send(head_of(200, "Transfer-Encoding: chunked") + b"1;")
    while True:
        talk.send(_BLOCK)


def endless_trailers(talk: Talk) -> None:
    """What follows the last chunk has no end."""
    talk.send(head_of(200, "Transfer-Encoding: chunked") + b"0\r\n")
    while True:
        talk.send(b"X-Padding: %b\r\n" % _BLOCK[:1000])


def single_bytes(talk: Talk) -> None:
    """A listing in chunks of one byte, to keep whoever joins them busy."""
    body = listing(*[entry() for _ in range(4000)])
    talk.send(head_of(200, "Transfer-Encoding: chunked"))
    for at in range(0, len(body), 4096):
        talk.send(b"".join(b"1\r\n%c\r\n" % byte for byte in body[at : at + 4096]))
    talk.send(b"0\r\n\r\n")


def long_refusal(talk: Talk) -> None:
    """403 with 3 MB of text."""
    talk.answer(403, refusal("AccessDenied", "no " * (1 << 20)))


def long_chunked_refusal(talk: Talk) -> None:
    """The same, without saying how much it is."""
    talk.send(head_of(403, "Transfer-Encoding: chunked"))
    while True:
        talk.send(b"%x\r\n%b\r\n" % (len(_BLOCK), _BLOCK))


# -- slowly, or not at all


def silent(talk: Talk) -> None:
    """No answer."""
    talk.wait()


def dripping_head(talk: Talk) -> None:
    """The head comes byte by byte."""
    talk.drip(b"HTTP/1.1 200 OK\r\nX-Padding: " + b"x" * 60_000)


def dripping_listing(talk: Talk) -> None:
    """The body comes byte by byte."""
    body = listing(*[entry() for _ in range(300)])
    talk.send(head_of(200, f"Content-Length: {len(body)}"))
    talk.drip(body)


def dripping_chunks(talk: Talk) -> None:
    """So does a chunked one."""
    talk.send(head_of(200, "Transfer-Encoding: chunked"))
    for byte in listing(*[entry() for _ in range(300)]):
        talk.drip(b"1\r\n%c\r\n" % byte)


def dripping_refusal(talk: Talk) -> None:
    """So does the text of a refusal."""
    talk.send(head_of(403, "Content-Length: 60000"))
    talk.drip(b"x" * 60_000)


# -- lies


def lying_length(talk: Talk) -> None:
    """An object of 10 bytes whose body is said to have 1 TB, and has much."""
    if talk.is_listing:
        talk.answer(200, listing(entry()))
        return
    talk.send(head_of(206, f"Content-Length: {1 << 40}", "Content-Range: bytes 0-9/10", f'ETag: "{ETAG}"'))
    while True:
        talk.send(_BLOCK)


def whole_in_place_of_range(talk: Talk) -> None:
    """The whole of an object of 1 TB, whatever range is asked for."""
    if talk.is_listing:
        talk.answer(200, listing(entry(size=1 << 40)))
        return
    talk.send(head_of(200, f"Content-Length: {1 << 40}", f'ETag: "{ETAG}"'))
    while True:
        talk.send(_BLOCK)


def impossible_sizes(talk: Talk) -> None:
    """Sizes that no object has."""
    sizes = ["-5", "1e9", "9" * 5000, "0x10", "٣", ""]
    if talk.is_listing:
        talk.answer(200, listing(*(entry(str(number), size) for number, size in enumerate(sizes))))
    elif talk.method == b"HEAD":
        talk.send(b"HTTP/1.1 200 X\r\nContent-Length: %b\r\n\r\n" % random.choice(sizes).encode())
    else:
        talk.send(b"HTTP/1.1 206 X\r\nContent-Range: bytes 0-1/*\r\nContent-Length: 2\r\n\r\nab")


def many_objects(talk: Talk) -> None:
    """A page of far more objects than were asked for."""
    body = listing(*[entry("k")] * 20_000)
    talk.answer(200, body)


# -- rubbish


def garbage(talk: Talk) -> None:
    """No HTTP at all."""
    talk.send(random.Random(1).randbytes(100_000))
    raise Gone


def garbage_xml(talk: Talk) -> None:
    """HTTP, and then no XML."""
    talk.answer(200, random.Random(2).randbytes(50_000))


def page(talk: Talk) -> None:
    """A web page, as a captive portal has it."""
    talk.answer(200, b"<html><body>Log in here</body></html>", "Content-Type: text/html")


def many_elements(talk: Talk) -> None:
    """A small document that is a large tree."""
    talk.answer(200, b"<ListBucketResult>" + b"<a/>" * 1_000_000 + b"</ListBucketResult>")


def deep_elements(talk: Talk) -> None:
    """A deep one."""
    talk.answer(200, b"<ListBucketResult>" + b"<a>" * 20_000)


def many_attributes(talk: Talk) -> None:
    """An element with very many attributes."""
    attributes = b"".join(b' a%x=""' % number for number in range(100_000))
    talk.answer(200, b"<ListBucketResult" + attributes + b"></ListBucketResult>")


def long_namespaces(talk: Talk) -> None:
    """A namespace that is a part of each name."""
    names = b"".join(b"<p:a%x/>" % number for number in range(500))
    uri = b"u" * 50_000
    talk.answer(200, b'<ListBucketResult xmlns="" xmlns:p="' + uri + b'">' + names + b"</ListBucketResult>")


def entities(talk: Talk) -> None:
    """Entities of entities, in UTF-16, in which no byte says <!DOCTYPE."""
    levels = "".join(f'<!ENTITY e{n} "{f"&e{n - 1};" * 10}">' for n in range(1, 8))
    text = f'<!DOCTYPE r [<!ENTITY e0 "xxxxxxxxxx">{levels}]><ListBucketResult>&e7;</ListBucketResult>'
    talk.answer(200, text.encode("utf-16"))


def long_names(talk: Talk) -> None:
    """A date, an id and a region of 60 KB each."""
    long = "x" * 20_000
    talk.answer(403, refusal(long, long), f"x-amz-request-id: {long}", f"x-amz-bucket-region: {long}")


ATTACKS: Mapping[str, Attack] = {
    "redirecting": redirecting("http://127.0.0.1:9/latest/meta-data/"),
    "other-region": region_named("eu-west-3"),
    "region-of-rubbish": region_named("x.evil.example/"),
    **{
        each.__name__.replace("_", "-"): each
        for each in (
            endless_listing, endless_object, endless_headers, endless_line, endless_interim, endless_chunk_line,
            endless_trailers, endless_pages, single_bytes, long_refusal, long_chunked_refusal, silent, dripping_head,
            dripping_listing, dripping_chunks, dripping_refusal, lying_length, whole_in_place_of_range,
            impossible_sizes, many_objects, garbage, garbage_xml, page, many_elements, deep_elements, many_attributes,
            long_namespaces, entities, long_names,
        )
    },
}  # fmt: skip
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
                    more = connection.recv(64 << 10)
                    if not more:
                        return
                    pending += more
                head, _, pending = pending.partition(b"\r\n\r\n")
                pending = _after_body(head, pending, connection)
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


def _after_body(head: bytes, pending: bytes, connection: socket.socket) -> bytes:
    """What follows the body of a request."""
    length = 0
    for line in head.split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            length = int(value)
    while len(pending) < length:
        more = connection.recv(64 << 10)
        if not more:
            raise Gone
        pending += more
    return pending[length:]
