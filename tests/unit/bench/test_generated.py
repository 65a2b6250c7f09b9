"""The server that keeps nothing answers like one that has the keys."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.generated import BUCKET, STREAM, TINY, Keys, pieces, run_generated
from bench.payload import BLOCK, block
from tests.servers import boto_client

KEYS = Keys(60, 7, 5 * BLOCK)
ALL = sorted(KEYS.key(index) for index in range(61))


def naive(prefix: str, delimiter: str) -> tuple[list[str], list[str]]:
    below = [key for key in ALL if key.startswith(prefix)]
    if not delimiter:
        return below, []
    rests = {key: key[len(prefix) :].find(delimiter) for key in below}
    common = dict.fromkeys(key[: len(prefix) + at + 1] for key, at in rests.items() if at >= 0)
    return [key for key in below if rests[key] < 0], list(common)


@given(
    prefix=st.sampled_from(["", "m", "many/", "many/d", "many/d00003", "many/d00003/", "many/d00003/f0", "s", "x"]),
    delimiter=st.sampled_from(["", "/"]),
    limit=st.integers(1, 20),
)
def test_pages_put_together_are_the_listing(prefix: str, delimiter: str, limit: int) -> None:
    keys: list[str] = []
    prefixes: list[str] = []
    after = ""
    while True:
        page = KEYS.page(prefix, delimiter, after, limit)
        assert len(page.keys) + len(page.prefixes) <= limit
        keys += [KEYS.key(index) for index in page.keys]
        prefixes += page.prefixes
        after = page.after
        if not after:
            break
    assert (keys, prefixes) == naive(prefix, delimiter)


@given(after=st.sampled_from(ALL))
def test_a_listing_goes_on_after_a_key(after: str) -> None:
    page = KEYS.page("", "", after, 1000)
    assert [KEYS.key(index) for index in page.keys] == [key for key in ALL if key > after]


@given(start=st.integers(0, 3 * BLOCK), length=st.integers(0, BLOCK + 10))
def test_a_range_is_cut_from_the_blocks(start: int, length: int) -> None:
    whole = b"".join(block(number) for number in range(5))
    assert b"".join(pieces(start, start + length)) == whole[start : start + length]


@pytest.mark.timeout(60)
def test_a_client_of_s3_finds_keys_and_ranges() -> None:
    with run_generated(KEYS) as server:
        client = boto_client(server)
        pages = client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, PaginationConfig={"PageSize": 9})
        assert [(found["Key"], found["Size"]) for page in pages for found in page["Contents"]] == [
            *((KEYS.key(index), TINY) for index in range(60)),
            (STREAM, 5 * BLOCK),
        ]
        got = client.get_object(Bucket=BUCKET, Key=STREAM, Range=f"bytes={BLOCK}-{BLOCK + 7}")
        assert got["Body"].read() == (1).to_bytes(8, "little")
        assert client.head_object(Bucket=BUCKET, Key=KEYS.key(3))["ContentLength"] == TINY
        with pytest.raises(client.exceptions.NoSuchKey):
            client.get_object(Bucket=BUCKET, Key="many/none")
