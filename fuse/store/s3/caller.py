"""One signed request to a bucket: signs, sends, follows the bucket to its region once, turns refusals into errors.

Threads: any. The endpoint is replaced as a whole when a region is learned; requests under way finish on the old one.
"""

from __future__ import annotations

import hashlib
import math
import re
import threading
import time
from collections.abc import Callable
from dataclasses import replace

from datastore.errors import CredentialsInvalid, InvalidRequest, StoreError

from ..base import ETag, in_memory
from ..limits import shown
from . import xml
from .credentials import CredentialSource
from .endpoint import Endpoint
from .errors import Refusal, error_class, to_error
from .messages import Answer, Request
from .sigv4 import EMPTY_SHA256, UNSIGNED_PAYLOAD, SigningKeys, canonical_headers, encode_query, moment, sign
from .transport import Transport

_REDIRECTS = frozenset({301, 307, 308, 400})
"""Statuses by which S3 says that a bucket is elsewhere (400: AuthorizationHeaderMalformed)."""
_WRITES = frozenset({"PUT", "POST"})
_REGION = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
_COMPARE_S = 1.0
"""How often the server's clock is compared with ours."""


class Caller:
    """Speaks to one bucket. follow: go after it into its region; clock: seconds since the epoch."""

    def __init__(
        self,
        endpoint: Endpoint,
        credentials: CredentialSource,
        connect: Callable[[Endpoint], Transport],
        *,
        follow: bool = True,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.credentials = credentials
        self._connect = connect
        self._follow = follow
        self._clock = clock
        self._lock = threading.Lock()
        self._place = (endpoint, connect(endpoint))
        self._ahead_s = 0.0
        self._compared_at = -math.inf

    @property
    def place(self) -> tuple[Endpoint, Transport]:
        """Where the bucket is, as far as is known, and the connections to there."""
        return self._place

    @property
    def endpoint(self) -> Endpoint:
        """Where the bucket is, as far as is known."""
        return self._place[0]

    def server_time_ns(self) -> int:
        """About what the server's clock shows, from the Date of an earlier answer; 0 before there was one.

        Never ahead of it but by drift: Date is cut to the second, and some servers' lags behind LastModified.
        """
        return 0 if self._compared_at == -math.inf else int((self._clock() + self._ahead_s) * 1e9)

    def send(self, request: Request) -> Answer:
        """The answer to a request, status below 300. Errors: StoreError as in s3/errors.py and transport.py."""
        keys = self.credentials.keys()
        endpoint, answer = self._exchange(request, keys)
        if answer.status >= 300 and self._has_others(request, answer, keys):
            keys = self.credentials.keys()
            endpoint, answer = self._exchange(request, keys)
        if answer.status in _REDIRECTS and self._follow:
            region = self._refusal(request, answer, keys).region
            if region not in {"", endpoint.region}:
                self._move(endpoint, region)
                _, answer = self._exchange(request, keys)
        # A server may say 200 while it copies or joins objects, and report in the body that it failed.
        if answer.status < 300 and (request.method not in _WRITES or xml.parse_error(bytes(answer.body)) is None):
            return answer
        raise self.error(request, answer, keys)

    def bodyless(self, method: str) -> Bodyless:
        """For many GETs or HEADs to where the bucket is, with the present keys. Errors: CredentialsInvalid."""
        return Bodyless(method, *self._place, self.credentials.keys(), self._clock)

    def is_changed(self, asking: Bodyless) -> bool:
        """Whether the bucket turned out to be elsewhere since, or there are other keys. Errors: CredentialsInvalid."""
        return self._place != (asking.endpoint, asking.transport) or self.credentials.keys() != asking.keys

    def error(self, request: Request, answer: Answer, keys: SigningKeys) -> StoreError:
        """What an answer to a request that was signed with `keys` refuses."""
        server_s = xml.http_date_ns(answer.headers.get("date", "")) / 1e9
        skew_s = server_s - self._clock() if server_s else 0.0
        return to_error(replace(self._refusal(request, answer, keys), skew_s=skew_s))

    def close(self) -> None:
        """Close connections; idempotent."""
        with self._lock:
            self._place[1].close()

    def _exchange(self, request: Request, keys: SigningKeys) -> tuple[Endpoint, Answer]:
        """Sign and send. TLS protects a body itself, as in botocore, and so does not leaving the machine; else the
        signature has to."""
        endpoint, transport = self._place
        path = endpoint.path(request.key)
        query = encode_query(request.query) if request.query else ""
        digest = EMPTY_SHA256
        if request.body:
            if endpoint.secure or (endpoint.on_this_machine and transport.route.proxy is None):
                digest = UNSIGNED_PAYLOAD
            else:
                body = in_memory(request.body)
                request, digest = replace(request, body=body), hashlib.sha256(body).hexdigest()
        headers = {**request.headers, "host": endpoint.host_header, "x-amz-content-sha256": digest}
        signed = sign(request.method, path, query, headers, keys, endpoint.region, self._clock())
        answer = transport.send(request, f"{path}?{query}" if query else path, signed)
        self.compare_clocks(answer)
        return endpoint, answer

    def _has_others(self, request: Request, answer: Answer, keys: SigningKeys) -> bool:
        """Whether the server does not take these keys any more, and there are others by now."""
        mute = request.method == "HEAD" and answer.status in {400, 403}  # without a body it can't say why
        invalid = mute or error_class(self._refusal(request, answer, keys)) is CredentialsInvalid
        return invalid and self.credentials.refused(keys)

    def compare_clocks(self, answer: Answer) -> None:
        """Of an answer that came just now."""
        now = self._clock()
        if now - self._compared_at < _COMPARE_S:
            return
        date_ns = xml.http_date_ns(answer.headers.get("date", ""))
        if date_ns:
            self._ahead_s, self._compared_at = date_ns / 1e9 - now, now

    def _move(self, seen: Endpoint, region: str) -> None:
        with self._lock:
            endpoint, transport = self._place
            if endpoint.region != seen.region:
                return
            moved = endpoint.in_region(region)
            if moved.host == endpoint.host:
                self._place = (moved, transport)
            else:
                self._place = (moved, self._connect(moved))
                transport.close()

    def _refusal(self, request: Request, answer: Answer, keys: SigningKeys) -> Refusal:
        said = xml.parse_error(bytes(answer.body))
        headers = answer.headers
        return Refusal(
            method=request.method,
            key=request.key,
            status=answer.status,
            code=said.code if said else "",
            message=said.message if said else "",
            request_id=(said.request_id if said else "") or headers.get("x-amz-request-id", ""),
            region=_region(headers.get("x-amz-bucket-region", ""))
            or _region(said.region if said and answer.status != 403 else ""),
            access_key_id=keys.access_key_id,
            if_none_match="if-none-match" in request.headers,
        )


class Bodyless:
    """GETs or HEADs of keys in one place, as they are sent: what those of one second share is put together once.

    One thread at a time.
    """

    def __init__(
        self, method: str, endpoint: Endpoint, transport: Transport, keys: SigningKeys, clock: Callable[[], float]
    ) -> None:
        self.endpoint = endpoint
        self.transport = transport
        self.keys = keys
        self._method = method
        self._clock = clock
        self._second = -1

    def head(self, key: str, etag: ETag | None = None) -> bytes:
        """etag: of the version that is wanted, which is not signed: its answer shows it. Errors: InvalidRequest."""
        second = int(self._clock())
        if second != self._second:
            self._begin(second)
        condition = ""
        if etag is not None:
            condition = f'if-match: "{etag}"\r\n'
            if not (etag.isascii() and etag.isprintable()):
                raise InvalidRequest(f"GET {shown(key)}: its ETag is not printable ASCII", key=key)
        path = self.endpoint.path(key)
        authorization = self._moment.authorization(self._names, f"{self._method}\n{path}\n\n{self._signed}")
        return f"{self._before}{path}{self._after}{condition}authorization: {authorization}\r\n\r\n".encode()

    def _begin(self, second: int) -> None:
        """Errors: InvalidRequest."""
        self._moment = moment(self.keys, self.endpoint.region, second)
        headers = {"host": self.endpoint.host_header, "x-amz-content-sha256": EMPTY_SHA256, **self._moment.headers}
        head = self.transport.connections.head(self._method, "", headers).decode()
        self._before, version, rest = head.partition(" HTTP/1.1\r\n")
        self._after = version + rest.removesuffix("\r\n")
        self._names, self._signed = canonical_headers(headers)
        self._second = second


def _region(said: str) -> str:
    """What a server says of a region, if it is the name of one: on AWS it becomes a part of the host's name."""
    return said if _REGION.fullmatch(said) else ""
