"""Our signer against botocore's, byte for byte (AWS Signature Version 4, S3 flavour)."""

from __future__ import annotations

import datetime
import hashlib
from unittest import mock
from urllib.parse import unquote_to_bytes

import botocore.auth
import pytest
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from hypothesis import example, given
from hypothesis import strategies as st

from datastore.api.source import S3Location, StaticCredentials
from datastore.errors import InvalidRequest
from datastore.fuse.store.limits import key_bytes
from datastore.fuse.store.s3.caller import Signer
from datastore.fuse.store.s3.dialing import Proxy, Route
from datastore.fuse.store.s3.endpoint import Endpoint, resolve
from datastore.fuse.store.s3.sigv4 import EMPTY_SHA256, UNSIGNED_PAYLOAD, encode_path, encode_query, sign
from datastore.fuse.store.s3.transport import Transport
from datastore.secret import Secret

MOMENT = datetime.datetime(2026, 2, 28, 23, 59, 59, tzinfo=datetime.UTC)

raw_keys = st.binary(min_size=1, max_size=60).map(lambda raw: raw.decode("utf-8", "surrogateescape"))
awkward_keys = st.sampled_from(["a//b", "/a", ".", "a/../b", "a/./b", "dir/", "%2F", "a b+c", "é", "\udcff", "~*'()!"])
keys = st.one_of(raw_keys, awkward_keys, st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=30))
printable = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=20)
tokens = st.one_of(st.none(), printable)
queries = st.lists(st.tuples(printable, st.text(st.characters(exclude_categories=["Cs"]), max_size=10)), max_size=4)
metadata = st.dictionaries(
    st.from_regex(r"x-amz-meta-[a-z0-9-]{1,8}", fullmatch=True),
    st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=20),
    max_size=3,
)


def keys_of(access_key_id: str, secret: Secret, token: Secret | None = None) -> StaticCredentials:
    return StaticCredentials(access_key_id=access_key_id, secret_access_key=secret, session_token=token)


def botocore_authorization(
    method: str, path: str, query: str, headers: dict[str, str], given: StaticCredentials, region: str
) -> str:
    token = given.session_token.reveal() if given.session_token else None
    credentials = Credentials(given.access_key_id, given.secret_access_key.reveal(), token)
    url = f"https://{headers['host']}{path}" + (f"?{query}" if query else "")
    sent = {name: value for name, value in headers.items() if name != "x-amz-content-sha256"}
    request = AWSRequest(method=method, url=url, headers=sent)
    signer = botocore.auth.S3SigV4Auth(credentials, "s3", region)
    with (
        mock.patch("botocore.auth.get_current_datetime", return_value=MOMENT),
        mock.patch.object(signer, "payload", return_value=headers["x-amz-content-sha256"]),
    ):
        signer.add_auth(request)
    return str(request.headers["Authorization"])


@given(
    method=st.sampled_from(["GET", "PUT", "HEAD", "POST", "DELETE"]),
    key=keys,
    query=queries,
    extra=metadata,
    token=tokens,
    region=st.sampled_from(["us-east-1", "eu-central-1", "cn-north-1"]),
    payload=st.sampled_from([EMPTY_SHA256, UNSIGNED_PAYLOAD, hashlib.sha256(b"body").hexdigest()]),
)
@example("GET", "a//b/../c/./d", [("prefix", "a b+c/"), ("list-type", "2")], {}, None, "us-east-1", EMPTY_SHA256)
@example(
    "PUT", "\udcff\x01 +%20", [("uploads", "")], {"x-amz-meta-a": "  two  spaces "}, "t/+=", "us-east-1", EMPTY_SHA256
)
def test_signatures_are_those_of_botocore(
    method: str,
    key: str,
    query: list[tuple[str, str]],
    extra: dict[str, str],
    token: str | None,
    region: str,
    payload: str,
) -> None:
    given_keys = keys_of("AKIDEXAMPLE", Secret("wJalrXUtnFEMI/K7MDENG+bPxRfiCY"), Secret(token) if token else None)
    path, encoded = f"/bucket/{encode_path(key)}", encode_query(query)
    headers = {"host": "example.test:9000", "x-amz-content-sha256": payload, **extra}
    signed = sign(method, path, encoded, headers, given_keys, region, MOMENT.timestamp())
    assert signed["authorization"] == botocore_authorization(method, path, encoded, headers, given_keys, region)
    assert signed.get("x-amz-security-token") == token


@given(key=keys)
def test_a_path_is_encoded_once_and_no_key_is_normalised(key: str) -> None:
    encoded = encode_path(key)
    assert unquote_to_bytes(encoded) == key_bytes(key)
    assert encoded.count("/") == key.count("/")
    assert encoded.isascii()


def test_a_signature_shows_no_secret() -> None:
    given_keys = keys_of("AKID", Secret("top-secret"))
    signed = sign("GET", "/", "", {"host": "h", "x-amz-content-sha256": EMPTY_SHA256}, given_keys, "r", 0.0)
    assert "top-secret" not in repr(signed) + repr(given_keys)


def signer_of(endpoint: Endpoint, secure: bool, given_keys: StaticCredentials, *seconds: float) -> Signer:
    clock = iter(seconds)
    transport = Transport(Route(endpoint.host, endpoint.port, secure, Proxy("proxy", 3128, "Basic x")))
    return Signer(endpoint, transport, given_keys, lambda: next(clock))


@given(key=keys, token=tokens, method=st.sampled_from(["GET", "HEAD", "DELETE"]), secure=st.booleans())
def test_what_is_put_together_in_haste_is_signed_as_any_request_is(
    key: str, token: str | None, method: str, secure: bool
) -> None:
    """Of every second anew, and through a proxy; what need not be signed stands beside it."""
    given_keys = keys_of("AKID", Secret("secret"), Secret(token) if token else None)
    endpoint = resolve(S3Location(bucket="data", endpoint="http://s3.test:9000/base"), "eu-west-3")
    signer = signer_of(endpoint, secure, given_keys, 1e9, 1e9 + 0.9, 1e9 + 1)
    more = {"if-match": '"e-1"', "range": "bytes=5-9"}
    for second in (1e9, 1e9, 1e9 + 1):
        headers = {"host": "data.s3.test:9000", "x-amz-content-sha256": EMPTY_SHA256}
        path = f"/base/{encode_path(key)}"
        signed = sign(method, path, "", headers, given_keys, "eu-west-3", second)
        expected = signer.transport.head(method, path, {**signed, **more})
        first, *lines = signer.plain(method, key, more).split(b"\r\n")
        expected_first, *expected_lines = expected.split(b"\r\n")
        assert first == expected_first
        assert sorted(lines) == sorted(expected_lines)
        assert lines[-2:] == [b"", b""]


@pytest.mark.parametrize("etag", ["a\r\nx-injected: 1", "a\nb", "a\rb", "\x00", "é", "\udcff"])
def test_a_version_that_headers_cant_carry_is_refused(etag: str) -> None:
    endpoint = resolve(S3Location(bucket="data", endpoint="http://s3.test:9000"))
    signer = signer_of(endpoint, False, keys_of("AKID", Secret("secret")), 1e9)
    with pytest.raises(InvalidRequest):
        signer.plain("GET", "key", {"if-match": etag})
