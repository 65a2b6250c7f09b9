"""Makes signed requests to a bucket: signs, sends, follows the bucket to its region once, turns refusals into errors.

Threads: any. The endpoint is replaced as a whole when a region is learned; requests under way finish on the old one.
"""

from __future__ import annotations

import hashlib
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType

from datastore.api.endpoints import AWS
from datastore.api.source import S3Location, StaticCredentials
from datastore.errors import CorruptBody, CredentialsInvalid, EndpointNotAllowed, InvalidRequest

from ...loop import running
from ..base import in_memory
from ..limits import shown
from . import xml
from .credentials import CredentialSource, find_source
from .dialing import Route, proxy_for, trust
from .endpoint import Endpoint, resolve
from .errors import Refusal, error_class, to_error
from .messages import A_PAGE, Answer, Request, http_date_ns
from .sigv4 import (
    EMPTY_SHA256,
    UNSIGNED_PAYLOAD,
    Moment,
    canonical_headers,
    encode_query,
    moment,
    sign,
)
from .transport import Transport, TransportLimits

_REDIRECTS = frozenset({301, 307, 308, 400})
"""Statuses by which S3 says that a bucket is in another region (400: AuthorizationHeaderMalformed)."""
_WRITES = frozenset({"PUT", "POST"})
_CHANGES = _WRITES | {"DELETE"}
_UNSIGNED = frozenset({"range", "if-match"})
"""Headers that a signature need not cover: it has to cover `host` and `x-amz-*` (SigV4, canonical headers)."""
_REGION = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
_PLACE = re.compile(
    r"(https?://)((?:[a-z0-9._-]{1,253}|\[[0-9a-f:.]{2,45}\])(?::[0-9]{1,5})?)(?:[/?#]|\Z)", re.IGNORECASE
)
"""Scheme and host at the start of a URL."""


class Caller:
    """Sends requests to one bucket. follow: whether to follow it to its region."""

    def __init__(
        self,
        endpoint: Endpoint,
        credentials: CredentialSource,
        connect: Callable[[Endpoint], Transport],
        *,
        follow: bool = True,
    ) -> None:
        self.credentials = credentials
        self.connect = connect
        self._follow = follow
        self._lock = threading.Lock()
        self.place = (endpoint, connect(endpoint))
        self._signer: Signer | None = None
        """The signer that was made last."""

    @property
    def endpoint(self) -> Endpoint:
        """Where the bucket is, as far as is known."""
        return self.place[0]

    async def send(self, request: Request) -> Answer:
        """Return the answer to a request, of status below 300. Errors: StoreErrors as in errors.py and transport.py."""
        renewed = moved = False
        while True:
            signer = await self.signer()
            if request.method in _WRITES or request.query or not request.headers.keys() <= _UNSIGNED:
                sent, head = signer.signed(request)
            else:
                sent, head = request, signer.plain(request.method, request.key, request.headers)
            answer = await signer.transport.send(sent, head)
            if answer.status < 300:
                break
            refusal = self._refusal(request, answer, signer.keys)
            if not (renewed or moved) and await self._has_others(refusal, signer.keys):
                renewed = True
            elif not moved and self._follows(refusal, signer):
                moved = True
            else:
                raise to_error(refusal)
        if request.method in _CHANGES and answer.body:
            body = bytes(answer.body)
            if xml.is_html(body):
                what = f"{request.method} {shown(request.key)}" if request.key else f"{request.method} of the bucket"
                raise CorruptBody(f"{what}: the answer is {A_PAGE}", key=request.key)
            # A server may say 200 while it copies or joins objects, and report in the body that it failed.
            if xml.parse_error(body) is not None:
                raise to_error(self._refusal(request, answer, signer.keys))
        return answer

    def close(self) -> None:
        """Close connections; idempotent."""
        with self._lock:
            self.place[1].close()

    async def signer(self) -> Signer:
        """Return a signer for the bucket's place and the present keys; the keys may have to be looked up first.
        Errors: CredentialsInvalid."""
        source, signer = self.credentials, self._signer
        keys = source.at_hand()
        if keys is None:
            loop = running()
            keys = source.keys() if loop is None else await loop.lane(source.keys)
        if signer is None or (signer.endpoint, signer.keys) != (self.place[0], keys):
            signer = self._signer = Signer(*self.place, keys, time.time)
        return signer

    async def _has_others(self, refusal: Refusal, keys: StaticCredentials) -> bool:
        """Return whether the server no longer accepts these keys, and there are other ones by now."""
        mute = refusal.method == "HEAD" and refusal.status in {400, 403}  # without a body it can't say why
        if not mute and error_class(refusal) is not CredentialsInvalid:
            return False
        loop = running()
        return self.credentials.refused(keys) if loop is None else await loop.lane(self.credentials.refused, keys)

    def _follows(self, refusal: Refusal, signer: Signer) -> bool:
        """Return whether the server says that the bucket is in another region, to which later requests then go."""
        region, seen = refusal.region, signer.endpoint.region
        if refusal.status not in _REDIRECTS or not self._follow or region in {"", seen}:
            return False
        with self._lock:
            endpoint, transport = self.place
            if endpoint.region == seen:
                moved = endpoint.in_region(region)
                if moved.host == endpoint.host:
                    self.place = (moved, transport)
                else:
                    self.place = (moved, self.connect(moved))
                    transport.close()
        return True

    def _refusal(self, request: Request, answer: Answer, keys: StaticCredentials) -> Refusal:
        """Return the parsed error answer to a request that was signed with `keys`."""
        said = xml.parse_error(bytes(answer.body)) or xml.ErrorAnswer("", "", "", "")
        headers = answer.headers
        server_s = http_date_ns(headers.get("date", "")) / 1e9
        route = self.place[1].route
        return Refusal(
            method=request.method,
            key=request.key,
            status=answer.status,
            code=said.code,
            message=said.message,
            request_id=said.request_id or headers.get("x-amz-request-id", ""),
            region=_region(headers.get("x-amz-bucket-region", ""))
            or _region("" if answer.status == 403 else said.region),
            redirect=_place(headers.get("location", ""), self.endpoint),
            access_key_id=keys.access_key_id,
            if_none_match="if-none-match" in request.headers,
            if_match="if-match" in request.headers and request.method in _WRITES,
            skew_s=server_s - time.time() if server_s else 0.0,
            proxy=f"{route.proxy.host}:{route.proxy.port}" if route.proxy and not route.secure else "",
        )


class Signer:
    """Signs requests to one endpoint with the same keys. Any thread may use it. clock: seconds since the epoch."""

    def __init__(
        self, endpoint: Endpoint, transport: Transport, keys: StaticCredentials, clock: Callable[[], float]
    ) -> None:
        self.endpoint = endpoint
        self.transport = transport
        self.keys = keys
        self._clock = clock
        self._shared: dict[str, tuple[int, Moment, str, str, str, str]] = {}
        """By method, what plain() puts into all heads of the latest second; two threads may compute the same."""

    def signed(self, request: Request) -> tuple[Request, bytes]:
        """Return any request, with its body as it is sent, and its head. Errors: InvalidRequest.

        The signature covers the body, except over TLS, which protects the body itself (as in botocore), and except when
        the server is on this machine.
        """
        endpoint = self.endpoint
        path = endpoint.path(request.key)
        query = encode_query(request.query) if request.query else ""
        digest = EMPTY_SHA256
        if request.body:
            if endpoint.secure or (endpoint.on_this_machine and self.transport.route.proxy is None):
                digest = UNSIGNED_PAYLOAD
            else:
                body = in_memory(request.body)
                request, digest = replace(request, body=body), hashlib.sha256(body).hexdigest()
        headers = {**request.headers, "host": endpoint.host_header, "x-amz-content-sha256": digest}
        signed = sign(request.method, path, query, headers, self.keys, endpoint.region, self._clock())
        length = len(request.body) if request.body or request.method in _WRITES else None
        return request, self.transport.head(request.method, f"{path}?{query}" if query else path, signed, length)

    def plain(self, method: str, key: str, unsigned: Mapping[str, str] = MappingProxyType({})) -> bytes:
        """Return the head of a GET, HEAD or DELETE without a query; the heads of one second have most in common.
        unsigned: headers that a signature need not cover. Errors: InvalidRequest."""
        second, shared = int(self._clock()), self._shared.get(method)
        if shared is None or shared[0] != second:
            shared = self._shared[method] = self._begin(method, second)
        _, now, before, after, names, described = shared
        more = "".join([f"{name}: {value}\r\n" for name, value in unsigned.items()])
        if more and not ((said := "".join(unsigned.values())).isascii() and said.isprintable()):
            raise InvalidRequest(f"{method} {shown(key)}: a header is not printable ASCII", key=key)
        path = self.endpoint.path(key)
        signed = now.authorization(names, f"{method}\n{path}\n\n{described}")
        return f"{before}{path}{after}{more}authorization: {signed}\r\n\r\n".encode()

    def _begin(self, method: str, second: int) -> tuple[int, Moment, str, str, str, str]:
        """Return an entry of _shared: second, Moment, the head before and after the path, canonical_headers()."""
        now = moment(self.keys, self.endpoint.region, second)
        headers = {"host": self.endpoint.host_header, "x-amz-content-sha256": EMPTY_SHA256, **now.headers}
        before, version, rest = self.transport.head(method, "", headers).decode().partition(" HTTP/1.1\r\n")
        return second, now, before, version + rest.removesuffix("\r\n"), *canonical_headers(headers)


def gather(
    location: S3Location, limits: TransportLimits, keys: CredentialSource | None = None, *, follow: bool = True
) -> Caller:
    """Return a location's Caller; nothing is sent. Errors: InvalidRequest, CredentialsInvalid, EndpointNotAllowed."""
    policy = location.policy
    if policy is not None and not policy.allows(location.endpoint):
        raise EndpointNotAllowed(
            f"spec.s3.endpoint: the administrator does not allow {location.endpoint or AWS} (ALLOW_ENDPOINTS)"
        )
    refusal = None if policy is None else partial(policy.refusal, location.endpoint)
    credentials = keys or find_source(location)
    endpoint = resolve(location, credentials.region)
    proxy = proxy_for(endpoint.host, secure=endpoint.secure)
    tls = trust(location.ca_bundle) if endpoint.secure else None

    def connect(to: Endpoint) -> Transport:
        return Transport(Route(to.host, to.port, to.secure, proxy, refusal), tls=tls, limits=limits)

    return Caller(endpoint, credentials, connect, follow=follow)


def _region(said: str) -> str:
    """Return the region that a server named, or '' if that is no name: on AWS it becomes a part of the host's name."""
    return said if _REGION.fullmatch(said) else ""


def _place(said: str, endpoint: Endpoint) -> str:
    """Return scheme and host of the URL that a server redirects to, without the bucket where that is a part of the
    host's name; '' if the text is no such URL. It is shown to the user and never followed (S-200)."""
    found = _PLACE.match(said)
    if found is None:
        return ""
    scheme, host = found.groups()
    return scheme + (host if endpoint.path_style else host.removeprefix(f"{endpoint.bucket}."))
