"""obstore as the mover of bytes without TLS: ranges and whole objects of ordinary keys, received outside the GIL.

It normalises paths, so keys with empty or dot segments, a slash at either end or bytes that are no UTF-8 are not for
it; nor does it tell servers' refusals apart. Whatever it can't express or explain is answered by `NotForBulk`, and the
adapter asks the exact client instead. Threads: any; tokio's own threads do the work.
"""

from __future__ import annotations

import re
import threading
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import obstore
from obstore.exceptions import BaseError, PreconditionError
from obstore.store import S3Store as ObstoreS3

from datastore.errors import CorruptBody, PreconditionFailed

from ..base import (
    Body,
    ByteRange,
    ETag,
    ObjectInfo,
    Sink,
)
from ..limits import shown
from .connections import Proxy, TransportLimits
from .credentials import CredentialSource
from .endpoint import Endpoint
from .sigv4 import SigningKeys

if TYPE_CHECKING:
    from obstore import GetOptions, GetResult
    from obstore.store import ClientConfig, S3Credential

_POOL_IDLE = timedelta(seconds=50)
_SINK_BYTES = 256 << 10
"""A sink gets pieces that fit the processor's cache: what is done with them there costs half of what it costs later."""
_STANDARD = frozenset(
    {"Cache-Control", "Content-Disposition", "Content-Encoding", "Content-Language", "Content-Type", "Storage-Class"}
)
"""What obstore shows beside user metadata, whose names are lower-case."""
_EXTRAORDINARY = re.compile(r"[\ud800-\udfff\0-\x1f\x7f]|(?:^|/)\.{0,2}(?:/|$)")
"""Half characters and control characters; segments that are empty or dots."""


class NotForBulk(Exception):
    """Ask the exact client."""


def is_ordinary(key: str) -> bool:
    """obstore sends this key as it is."""
    return _EXTRAORDINARY.search(key) is None


class Bulk:
    """One bucket through obstore."""

    def __init__(
        self,
        credentials: CredentialSource,
        *,
        proxy: Proxy | None = None,
        limits: TransportLimits | None = None,
    ) -> None:
        self._credentials = credentials
        self._options = _client_options(limits or TransportLimits(), proxy)
        self._lock = threading.Lock()
        self._made: tuple[tuple[Endpoint, SigningKeys | None], ObstoreS3] | None = None

    def get(
        self,
        endpoint: Endpoint,
        key: str,
        byte_range: ByteRange | None,
        if_match: ETag | None,
        sink: Sink | None = None,
    ) -> tuple[Body, ObjectInfo]:
        """The bytes of an ordinary key. Errors: PreconditionFailed, CorruptBody, NotForBulk (anything else)."""
        options: GetOptions = {}
        if byte_range is not None:
            options["range"] = (byte_range.start, byte_range.stop)
        if if_match is not None:
            options["if_match"] = f'"{if_match}"'
        try:
            result = obstore.get(self._store(endpoint), key, options=options)
            info = _info(key, result)
            body, got = _received(result, info, sink)
        except PreconditionError as error:
            raise PreconditionFailed(f"GET {shown(key)}: the object is another version", key=key, status=412) from error
        except (BaseError, OSError, ValueError) as error:
            raise NotForBulk(type(error).__name__) from error
        start, stop = result.range
        if got != stop - start:
            raise CorruptBody(f"GET {shown(key)}: {got} bytes came of {stop - start}", key=key)
        return body, info

    def _store(self, endpoint: Endpoint) -> ObstoreS3:
        # obstore keeps keys that never expire, so that others need another store.
        keys = self._credentials.keys() if self._credentials.expires() is None else None
        made = self._made
        if made is None or made[0] != (endpoint, keys):
            with self._lock:  # a client takes 50 ms to make, and the first requests come together
                made = self._made
                if made is None or made[0] != (endpoint, keys):
                    made = self._made = ((endpoint, keys), self._make(endpoint))
        return made[1]

    def _make(self, endpoint: Endpoint) -> ObstoreS3:
        url = endpoint.service_url
        if not endpoint.path_style:
            url = f"{endpoint.scheme}://{endpoint.host_header}{endpoint.base_path}"
        return ObstoreS3(
            endpoint.bucket,
            endpoint=url,
            region=endpoint.region,
            virtual_hosted_style_request=not endpoint.path_style,
            client_options=self._options,
            retry_config={"max_retries": 0, "retry_timeout": timedelta(0)},
            credential_provider=self._present_keys,
        )

    def _present_keys(self) -> S3Credential:
        keys = self._credentials.keys()
        return {
            "access_key_id": keys.access_key_id,
            "secret_access_key": keys.secret_access_key.reveal(),
            "token": keys.session_token.reveal() if keys.session_token else None,
            "expires_at": self._credentials.expires(),
        }


def _info(key: str, result: GetResult) -> ObjectInfo:
    meta, attributes = result.meta, result.attributes
    return ObjectInfo(
        key=key,
        size=meta["size"],
        etag=ETag((meta["e_tag"] or "").removeprefix("W/").strip('"')),
        mtime_ns=int(meta["last_modified"].timestamp()) * 1_000_000_000,
        server_time_ns=0,
        metadata={name: text for name, text in attributes.items() if name not in _STANDARD},
        content_type=attributes.get("Content-Type", ""),
    )


def _received(result: GetResult, info: ObjectInfo, sink: Sink | None) -> tuple[Body, int]:
    """The body, b"" when the sink got it, and how many bytes came."""
    if sink is None:
        body = memoryview(result.bytes())
        return body, len(body)
    done = 0
    for piece in result.stream(min_chunk_size=_SINK_BYTES):
        sink(info, done, memoryview(piece))
        done += len(piece)
    return b"", done


def _client_options(limits: TransportLimits, proxy: Proxy | None) -> ClientConfig:
    options: dict[str, Any] = {
        "allow_http": True,
        "connect_timeout": timedelta(seconds=limits.connect_s),
        "read_timeout": timedelta(seconds=limits.idle_s),
        "timeout": timedelta(seconds=limits.call_s * 2),
        "pool_idle_timeout": _POOL_IDLE,
        "pool_max_idle_per_host": str(limits.connections),
    }
    if proxy is not None:
        options["proxy_url"] = proxy.url
    made: ClientConfig = options  # type: ignore[assignment]
    return made
