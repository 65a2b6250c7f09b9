"""An S3 server without storage: it computes a million keys and a huge object. `python -m bench.generated`.

It answers the requests of a read-only mount: ListObjectsV2, HEAD and GET with a range. It does not check signatures.
The keys are many/dDDDDD/fDDDDD with TINY bytes each, and `stream`.
"""

from __future__ import annotations

import argparse
import re
import sys
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar
from urllib.parse import parse_qs, quote, unquote, urlsplit

from bench.payload import BLOCK, block
from bench.processes import child, wait_for
from bench.worker import ROOT
from tests.servers import Server, free_port

BUCKET = "generated"
STREAM = "stream"
TINY = 64
START_TIMEOUT_S = 20.0
_XML = '<?xml version="1.0" encoding="UTF-8"?>'
_NS = 'xmlns="http://s3.amazonaws.com/doc/2006-03-01/"'
_MTIME = "2024-01-01T00:00:00.000Z"
_HTTP_MTIME = "Mon, 01 Jan 2024 00:00:00 GMT"
_RANGE = re.compile(r"bytes=(\d+)-(\d*)")
_AFTER_EVERY_KEY = "\U0010ffff"


@dataclass(frozen=True, slots=True)
class Page:
    """One page of a listing: the indices of keys, and common prefixes, in order. after: where the next page begins."""

    keys: list[int]
    prefixes: list[str]
    after: str = ""


@dataclass(frozen=True, slots=True)
class Keys:
    """`count` keys in order, each computed from its index, and STREAM as the last key."""

    count: int
    per_folder: int
    stream: int

    def key(self, index: int) -> str:
        """The index-th key."""
        if index == self.count:
            return STREAM
        return f"many/d{index // self.per_folder:05}/f{index % self.per_folder:05}"

    def size(self, index: int) -> int:
        """The size of the index-th object in bytes."""
        return self.stream if index == self.count else TINY

    def find(self, key: str) -> int | None:
        """The index of a key, or None when there is no such key."""
        index = self.first(key)
        return index if index <= self.count and self.key(index) == key else None

    def first(self, text: str) -> int:
        """The index of the first key that is not before `text`."""
        return bisect_left(range(self.count + 1), text, key=self.key)

    def page(self, prefix: str, delimiter: str, after: str, limit: int) -> Page:
        """Return a page of ListObjectsV2: at most `limit` entries that follow `after`."""
        index = max(self.first(prefix), self.first(after + "\0") if after else 0)
        end = self.first(prefix + _AFTER_EVERY_KEY)
        page = Page([], [])
        last = ""
        while index < end:
            if len(page.keys) + len(page.prefixes) == limit:
                return Page(page.keys, page.prefixes, last)
            key = self.key(index)
            cut = key.find(delimiter, len(prefix)) if delimiter else -1
            if cut < 0:
                page.keys.append(index)
                last, index = key, index + 1
            else:
                common = key[: cut + 1]
                index = self.first(common + _AFTER_EVERY_KEY)
                if common > after:
                    page.prefixes.append(common)
                last = common + _AFTER_EVERY_KEY
        return page


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16
    disable_nagle_algorithm = True
    keys: ClassVar[Keys]

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        url = urlsplit(self.path)
        bucket, _, key = unquote(url.path).lstrip("/").partition("/")
        query = {name: values[0] for name, values in parse_qs(url.query, keep_blank_values=True).items()}
        if bucket != BUCKET:
            self._send(404, _error("NoSuchBucket"))
        elif key:
            self._object(key)
        elif "location" in query:
            self._send(200, f"{_XML}<LocationConstraint {_NS}/>".encode())
        else:
            self._send(200, self._listing(query))

    def _listing(self, query: dict[str, str]) -> bytes:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        token = query.get("continuation-token", "")
        page = self.keys.page(
            prefix, delimiter, unquote(token) or query.get("start-after", ""), int(query.get("max-keys", 1000))
        )
        more = f"<NextContinuationToken>{quote(page.after)}</NextContinuationToken>" if page.after else ""
        return "".join(
            (
                f"{_XML}<ListBucketResult {_NS}><Name>{BUCKET}</Name><Prefix>{prefix}</Prefix>",
                f"<KeyCount>{len(page.keys) + len(page.prefixes)}</KeyCount><MaxKeys>1000</MaxKeys>",
                f"<IsTruncated>{'true' if page.after else 'false'}</IsTruncated>{more}",
                *(
                    f"<Contents><Key>{self.keys.key(index)}</Key><LastModified>{_MTIME}</LastModified>"
                    f"<ETag>&quot;{index:032x}&quot;</ETag><Size>{self.keys.size(index)}</Size>"
                    "<StorageClass>STANDARD</StorageClass></Contents>"
                    for index in page.keys
                ),
                *(f"<CommonPrefixes><Prefix>{each}</Prefix></CommonPrefixes>" for each in page.prefixes),
                "</ListBucketResult>",
            )
        ).encode()

    def _object(self, key: str) -> None:
        index = self.keys.find(key)
        if index is None:
            self._send(404, _error("NoSuchKey"))
            return
        size = self.keys.size(index)
        asked = _RANGE.fullmatch(self.headers.get("Range", ""))
        start = int(asked[1]) if asked else 0
        stop = min(int(asked[2]) + 1, size) if asked and asked[2] else size
        if start >= size:
            self._send(416, _error("InvalidRange"))
            return
        self.send_response(206 if asked else 200)
        self.send_header("Content-Length", str(stop - start))
        self.send_header("ETag", f'"{index:032x}"')
        self.send_header("Last-Modified", _HTTP_MTIME)
        self.send_header("Accept-Ranges", "bytes")
        if asked:
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{size}")
        self.end_headers()
        if self.command == "GET":
            for piece in pieces(start, stop):
                self.wfile.write(piece)

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Type", "application/xml")
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        """Log nothing: a line for each request would be a million lines."""


def pieces(start: int, stop: int) -> Iterator[memoryview]:
    """Yield the bytes [start, stop) of an object."""
    while start < stop:
        number, skip = divmod(start, BLOCK)
        count = min(BLOCK - skip, stop - start)
        yield memoryview(block(number))[skip : skip + count]
        start += count


def _error(code: str) -> bytes:
    return f"{_XML}<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode()


@contextmanager
def run_generated(keys: Keys) -> Iterator[Server]:
    """Run the server in a separate process."""
    port = free_port()
    numbers = (port, keys.count, keys.per_folder, keys.stream)
    with child([sys.executable, "-m", "bench.generated", *map(str, numbers)], cwd=ROOT) as started:
        wait_for(started.listens(port), START_TIMEOUT_S, "the generated server did not start")
        yield Server(
            name="generated",
            endpoint=f"http://127.0.0.1:{port}",
            access_key="generated",
            secret_key="generated",
            pid=started.pid,
        )


def main() -> None:
    """Serve until the process is ended."""
    parser = argparse.ArgumentParser()
    for name in ("port", "count", "per_folder", "stream"):
        parser.add_argument(name, type=int)
    options = parser.parse_args()
    _Handler.keys = Keys(options.count, options.per_folder, options.stream)
    server = ThreadingHTTPServer(("127.0.0.1", options.port), _Handler)
    server.daemon_threads = True
    server.serve_forever()


if __name__ == "__main__":
    main()
