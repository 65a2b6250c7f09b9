"""Every refusal of a server becomes one error of ours, with the server's words."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datastore import errors as e
from datastore.fuse.store.s3.errors import MEANT, Refusal, error_class, one_line, to_error


@given(
    status=st.integers(300, 599),
    code=st.one_of(st.sampled_from(sorted(MEANT)), st.text(max_size=10)),
    message=st.text(max_size=400),
    key=st.one_of(st.just(""), st.binary(min_size=1, max_size=300).map(lambda b: b.decode("utf-8", "surrogateescape"))),
    condition=st.booleans(),
)
def test_the_table_is_total_and_the_text_is_one_printable_line(
    status: int, code: str, message: str, key: str, condition: bool
) -> None:
    error = to_error(Refusal(method="GET", key=key, status=status, code=code, message=message, if_none_match=condition))
    assert isinstance(error, e.StoreError)
    assert error.key == key
    assert error.status == status
    assert "\n" not in str(error)
    str(error).encode()


@pytest.mark.parametrize("kind", sorted(set(MEANT.values()), key=str))
def test_every_class_of_the_table_says_what_to_think(kind: type[e.StoreError]) -> None:
    said = [word for word, meant in MEANT.items() if meant is kind]
    code = next((word for word in said if not word.isdigit()), "")
    status = next((int(word) for word in said if word.isdigit()), 418)
    error = to_error(Refusal(method="PUT", key="k", status=status, code=code, message="words", request_id="R1"))
    assert isinstance(error, kind)
    assert "words" in str(error)
    assert "R1" in str(error)


@pytest.mark.parametrize(
    ("refusal", "kind"),
    [
        (Refusal(method="HEAD", key="k", status=404), e.NotFound),
        (Refusal(method="HEAD", key="", status=404), e.BucketNotFound),
        (Refusal(method="HEAD", key="k", status=403), e.AccessDenied),
        (Refusal(method="HEAD", key="k\udcff", status=403), e.InvalidKey),
        (Refusal(method="PUT", key="k\udcff", status=403, code="SignatureDoesNotMatch"), e.InvalidKey),
        (Refusal(method="PUT", key="k", status=403, code="SignatureDoesNotMatch"), e.CredentialsInvalid),
        (Refusal(method="PUT", key="k", status=412, if_none_match=True), e.AlreadyExists),
        (Refusal(method="PUT", key="k", status=412), e.PreconditionFailed),
        (Refusal(method="PUT", key="k", status=409, code="ConditionalRequestConflict"), e.Throttled),
        (Refusal(method="PUT", key="d/" + "x" * 256, status=409, code="ExistingObjectIsDirectory"), e.KeyTooLong),
        (Refusal(method="PUT", key="d/x", status=409, code="ExistingObjectIsDirectory"), e.KeyConflict),
        (Refusal(method="PUT", key="d/x/y", status=409, code="ExistingObjectIsFile"), e.KeyConflict),
        (Refusal(method="HEAD", key="d/" + "x" * 256, status=400), e.KeyTooLong),
        (Refusal(method="PUT", key="a/..", status=400, code="400"), e.InvalidKey),
        (Refusal(method="POST", key="a/..", status=400, code="InvalidPart"), e.InvalidRequest),
        (Refusal(method="GET", key="", status=400, code="AuthorizationHeaderMalformed", region="eu"), e.WrongRegion),
        (Refusal(method="GET", key="", status=400, code="AuthorizationHeaderMalformed"), e.CredentialsInvalid),
        (Refusal(method="HEAD", key="k", status=301, region="eu"), e.WrongRegion),
        (Refusal(method="GET", key="", status=301, code="PermanentRedirect"), e.WrongRegion),
        (Refusal(method="HEAD", key="k", status=301, redirect="https://h"), e.InvalidRequest),
        (Refusal(method="GET", key="k", status=418), e.InvalidRequest),
        (Refusal(method="GET", key="k", status=599), e.ServerFault),
    ],
)
def test_refusals_that_need_a_second_look(refusal: Refusal, kind: type[e.StoreError]) -> None:
    assert error_class(refusal) is kind


def test_a_wrong_secret_names_the_access_key() -> None:
    error = to_error(
        Refusal(method="GET", key="", status=403, code="SignatureDoesNotMatch", message="no", access_key_id="AKID")
    )
    assert "secret access key is wrong for access key id AKID" in str(error)
    assert "server says: SignatureDoesNotMatch: no" in str(error)


def test_a_region_that_was_told_is_kept() -> None:
    error = to_error(Refusal(method="GET", key="", status=301, code="PermanentRedirect", region="eu-west-1"))
    assert isinstance(error, e.WrongRegion)
    assert error.region == "eu-west-1"
    assert "eu-west-1" in str(error)


def test_foreign_words_are_bounded() -> None:
    assert len(one_line("x" * 10_000)) < 400
    assert one_line("a\r\n\x1b[31mb\t c") == "a [31mb c"
