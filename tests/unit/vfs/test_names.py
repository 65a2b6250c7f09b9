"""Local names and key segments translate into each other without loss."""

from __future__ import annotations

import os

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from datastore.fuse.vfs.tree.names import LINK_SUFFIX, name_of, one_key, segment_of
from tests.promises import promise

names = (
    st.binary(min_size=1, max_size=255)
    | st.text(min_size=1).map(lambda text: text.encode("utf-8", "surrogatepass"))
    | st.text(st.sampled_from("\uf000\uf02e\uf02f\uf0ff\uefff\uf100.ab\ufffe\uffff\x7f\x80\x01"), min_size=1).map(
        str.encode
    )
).filter(lambda name: b"\0" not in name and b"/" not in name and name not in (b".", b".."))
# Keys come as text with surrogateescape, which makes no other surrogates.
segments = st.text(st.characters(exclude_characters="/", codec="utf-8")) | st.binary().map(os.fsdecode).filter(
    lambda s: "/" not in s
)


@promise("S-34")
@given(names, st.booleans())
@example(b"x.rclonelink", False)
@example("\uf02e".encode(), False)
@example("\uf02e\uf02e".encode(), True)
@example(b"\xed\xb2\x80", False)
def test_every_name_comes_back(name: bytes, directory: bool) -> None:
    """Whatever the bytes, its segment shows the name again."""
    segment = segment_of(name, directory=directory)
    assert "/" not in segment
    assert name_of(segment, directory=directory) == name


@promise("S-34", "S-37")
@given(names)
def test_segments_are_what_xml_and_http_can_carry(name: bytes) -> None:
    """UTF-8 without control characters below space; and no file's segment ends as links do."""
    segment = segment_of(name)
    segment.encode()
    assert all(ord(character) >= 0x20 and character not in "\ufffe\uffff" for character in segment)
    assert not segment.endswith(LINK_SUFFIX)


@promise("S-36")
@given(segments, st.booleans())
def test_segments_of_other_tools_are_names(segment: str, directory: bool) -> None:
    """Whatever a key has between its slashes, some name shows it, and that name can be in a directory."""
    name = name_of(segment, directory=directory)
    assert name not in (b"", b".", b"..")
    assert b"/" not in name
    assert b"\0" not in name or "\0" in segment


@promise("S-34")
@given(st.text(st.characters(min_codepoint=0x20, max_codepoint=0x2FF, exclude_characters="/"), min_size=1))
def test_ordinary_names_are_their_own_segments(text: str) -> None:
    """What other tools see is what a person typed."""
    if text in (".", "..") or text.endswith(LINK_SUFFIX):
        return
    assert segment_of(text.encode()) == text


@promise("S-36")
@pytest.mark.parametrize(
    ("segment", "name"),
    [
        ("", "\uf02f"),
        (".", "\uf02e"),
        ("..", "\uf02e\uf02e"),
        ("...", "..."),
        ("a\uf0ff", b"a\xff"),
        ("a\uf041", "a\uf041"),
        ("a\uf000b", "a\uf000b"),
        ("\uf02fb", "\uf02fb"),
    ],
)
def test_odd_segments(segment: str, name: str | bytes) -> None:
    """The reserved displays; private characters that nobody escaped stay as they are."""
    assert name_of(segment) == (name if isinstance(name, bytes) else name.encode())


@promise("S-37")
@given(names.filter(one_key))
def test_a_name_of_one_key(name: bytes) -> None:
    """What is asked for by its key alone has no other key in any listing."""
    assert not name.endswith(LINK_SUFFIX.encode())
    assert name_of(segment_of(name)) == name
