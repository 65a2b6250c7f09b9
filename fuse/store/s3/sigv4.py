"""AWS Signature Version 4 for S3, in header form, over exact keys.

Pure: the time is an argument. Paths and queries are encoded once and never normalised, as S3 asks ("Authenticating
Requests: Using the Authorization Header", Amazon S3 API reference). Checked byte for byte against botocore's
S3SigV4Auth in tests/unit/store/test_sigv4.py.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Mapping
from functools import lru_cache
from time import gmtime, strftime
from typing import NamedTuple
from urllib.parse import quote

from datastore.api.source import StaticCredentials
from datastore.secret import Secret

ALGORITHM = "AWS4-HMAC-SHA256"
EMPTY_SHA256 = hashlib.sha256(b"").hexdigest()
UNSIGNED_PAYLOAD = "UNSIGNED-PAYLOAD"


def encode_path(key: str) -> str:
    """Return a key as it stands in a request's path: each byte but unreserved ones and '/' is escaped, once."""
    return quote(key, safe="/-_.~", errors="surrogateescape")


def encode_query(parameters: Iterable[tuple[str, str]]) -> str:
    """Return the canonical query string, which is also sent: sorted, everything escaped, '=' always there."""
    pairs = sorted((_escape(name), _escape(value)) for name, value in parameters)
    return "&".join(f"{name}={value}" for name, value in pairs)


def sign(
    method: str, path: str, query: str, headers: Mapping[str, str], keys: StaticCredentials, region: str, now_s: float
) -> dict[str, str]:
    """Return the headers to send: the given ones, and those of the signature.

    headers have lower-case names and hold `host` and `x-amz-content-sha256`; path and query are already encoded;
    now_s is seconds since the epoch.
    """
    now = moment(keys, region, now_s)
    signed = {**headers, **now.headers}
    names, described = canonical_headers(signed)
    signed["authorization"] = now.authorization(names, f"{method}\n{path}\n{query}\n{described}")
    return signed


class Moment(NamedTuple):
    """Common to all signatures of one second: headers to add and sign, beginnings of the two texts, the signing key."""

    headers: Mapping[str, str]
    credential: str
    to_sign: str
    key: bytes

    def authorization(self, names: str, canonical: str) -> str:
        """Return the authorization header of a canonical request. names: its signed headers."""
        to_sign = f"{self.to_sign}{hashlib.sha256(canonical.encode()).hexdigest()}"
        signature = hmac.digest(self.key, to_sign.encode(), "sha256").hex()
        return f"{self.credential}, SignedHeaders={names}, Signature={signature}"


def moment(keys: StaticCredentials, region: str, now_s: float) -> Moment:
    """Return the Moment of now_s, seconds since the epoch."""
    stamp = strftime("%Y%m%dT%H%M%SZ", gmtime(now_s))
    headers = {"x-amz-date": stamp}
    if keys.session_token is not None:
        headers["x-amz-security-token"] = keys.session_token.reveal()
    scope = f"{stamp[:8]}/{region}/s3/aws4_request"
    key = _derive(keys.secret_access_key, stamp[:8], region)
    credential = f"{ALGORITHM} Credential={keys.access_key_id}/{scope}"
    return Moment(headers, credential, f"{ALGORITHM}\n{stamp}\n{scope}\n", key)


def canonical_headers(headers: Mapping[str, str]) -> tuple[str, str]:
    """Return the names of the signed headers, and what the canonical request has after its query."""
    names = sorted(headers)
    lines = "".join([f"{name}:{' '.join(headers[name].split())}\n" for name in names])
    name_list = ";".join(names)
    return name_list, f"{lines}\n{name_list}\n{headers['x-amz-content-sha256']}"


@lru_cache(maxsize=32)
def _derive(secret: Secret, day: str, region: str) -> bytes:
    """Return the day's signing key; cached, since it costs four of the five HMACs of a signature."""
    key = b"AWS4" + secret.reveal().encode()
    for part in (day, region, "s3", "aws4_request"):
        key = hmac.digest(key, part.encode(), "sha256")
    return key


def _escape(text: str) -> str:
    return quote(text, safe="-_.~", errors="surrogateescape")
