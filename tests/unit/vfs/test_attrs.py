"""Attributes and their form as user metadata."""

from __future__ import annotations

import json
import stat
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datastore.fuse.vfs.tree.attrs import (
    Attributes,
    Defaults,
    from_metadata,
    to_metadata,
    without_suidgid,
)
from tests.promises import promise

DEFAULTS = Defaults(1, 2).of(stat.S_IFREG, 3)

ids = st.integers(0, (1 << 32) - 1)
times = st.integers(-(1 << 62), 1 << 62)
kinds = st.sampled_from([stat.S_IFREG, stat.S_IFLNK, stat.S_IFIFO, stat.S_IFSOCK])
attributes = st.builds(
    Attributes,
    mode=st.builds(lambda kind, mode: kind | mode, kinds, st.integers(0, 0o7777)),
    uid=ids,
    gid=ids,
    atime_ns=times,
    mtime_ns=times,
    ctime_ns=times,
    xattrs=st.dictionaries(
        st.binary(min_size=1, max_size=20).map(lambda name: b"user." + name), st.binary(max_size=50)
    ),
    extra=st.dictionaries(st.sampled_from(["origin", "x-tool", "color"]), st.sampled_from(["", "a", "b c"])),
    target=st.none(),
    content_type=st.just(DEFAULTS.content_type),
)


@promise("S-11", "S-14")
@given(attributes)
def test_attributes_survive_their_form_as_metadata(one: Attributes) -> None:
    """Every attribute survives its form as metadata, and the form is one that HTTP carries."""
    metadata = to_metadata(one)
    for name, value in metadata.items():
        assert (name + value).isascii()
        assert (name + value).isprintable()
        assert (name, value) == (name.lower(), value.strip())
    assert from_metadata(metadata, stat.S_IFREG, DEFAULTS) == one


garbage = (
    st.text(max_size=40)
    | st.sampled_from(["-1", "1e9", "99999999999999999999", "1.", ".5", "1.-5", "--", " 1", "+1", "0x1ff", "1_0"])
    | st.sampled_from(["\u0661", "-0.5", "NaN", "[]", "{}"])
)
fields = st.sampled_from(["mode", "uid", "gid", "mtime", "ctime", "atime", "xattr", "--symlink-target", "other"])


@promise("S-11")
@given(st.dictionaries(fields, garbage), st.sampled_from([stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK]))
def test_metadata_of_other_tools_never_fails(metadata: dict[str, str], kind: int) -> None:
    """Whatever is there, a stat can be answered: numbers fit the kernel's fields and the key's kind is kept."""
    found = from_metadata(metadata, kind, Defaults(1, 2).of(kind, 3))
    assert 0 <= found.uid < 1 << 32
    assert 0 <= found.gid < 1 << 32
    assert 0 <= found.mode < 1 << 16
    for time_ns in (found.atime_ns, found.mtime_ns, found.ctime_ns):
        assert -(1 << 63) <= time_ns // 10**9 < 1 << 63
    if kind != stat.S_IFREG:
        assert stat.S_IFMT(found.mode) == kind
    to_metadata(found)


@promise("S-14")
@given(
    st.recursive(
        st.none() | st.integers() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)
    )
)
def test_any_json_in_the_xattr_metadata_is_read_without_an_error(document: object) -> None:
    """What is not name -> base64 counts as none."""
    found = from_metadata({"xattr": quote(json.dumps(document))}, stat.S_IFREG, DEFAULTS)
    assert all(isinstance(name, bytes) and isinstance(value, bytes) for name, value in found.xattrs.items())


@promise("S-11", "S-10")
@pytest.mark.parametrize("mode", [0o600, stat.S_IFDIR | 0o600])
def test_a_mode_that_no_file_can_have_counts_as_a_file_with_its_permissions(mode: int) -> None:
    """Some tools write the permissions alone; and a file's key is no directory, whatever its mode says."""
    assert from_metadata({"mode": str(mode)}, stat.S_IFREG, DEFAULTS).mode == stat.S_IFREG | 0o600


@promise("S-16")
@pytest.mark.parametrize(
    ("before", "after"),
    [(0o6755, 0o755), (0o6745, 0o2745), (0o4644, 0o644), (0o2755, 0o755), (0o2644, 0o2644), (0o1755, 0o1755)],
)
def test_a_change_drops_setuid_and_a_setgid_that_the_group_could_execute(before: int, after: int) -> None:
    """Setuid always, setgid where the group may execute; nothing of a directory."""
    assert without_suidgid(stat.S_IFREG | before) == stat.S_IFREG | after
    assert without_suidgid(stat.S_IFDIR | before) == stat.S_IFDIR | before
