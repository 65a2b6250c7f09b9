"""Names on a real mount (docs/SEMANTICS.md, Names)."""

from __future__ import annotations

import errno
import os

import botocore.exceptions
import pytest

from tests.mount.conftest import Mounter
from tests.mount.mounts import Area, fails, settle
from tests.promises import promise

pytestmark = pytest.mark.fuse

NASTY = (
    b"two words",
    b" leading and trailing ",
    b"%20%2F",
    b"plus+plus",
    b"hash#tag",
    b"question?mark",
    b"star*",
    b"{braces}[brackets]",
    b"back\\slash",
    b"colon:semi;",
    b"quote\"'`$HOME",
    b"\x01control\x7f",
    b"new\nline\ttab\rreturn",
    "emoji 🎉 и日本".encode(),
    b"latin caf\xe9 \xff\xfe",
    b"-dash & <xml> ]]>",
    "e\u0301 not composed \uf02f".encode(),
    b"...",
    b"named-like-a.rclonelink",
    "\ufeff\u200b\u202e".encode(),
    b"n" * 255,
    "é".encode() * 127 + b"x",
)
MINIO_DIRECTORY_MAX = 246
"""Bytes of a directory's name: MinIO keeps the marker as a file whose name has 9 more."""


def raw(area: Area, name: bytes) -> bytes:
    return os.fsencode(area.path) + b"/" + name


def utf8_prefix(name: bytes, size: int) -> bytes:
    """The first bytes of a name, in whole characters."""
    return name if len(name) <= size else name[:size].decode(errors="ignore").encode()


def longest(area: Area) -> int:
    """Bytes of a name that may be made: 227 on versitygw (S-38), else 255."""
    return 227 if area.server.name == "versitygw" else 255


def nasty(area: Area) -> list[bytes]:
    return [utf8_prefix(name, longest(area)) for name in NASTY]


def write(path: bytes, body: bytes) -> None:
    with open(path, "wb") as file:
        file.write(body)


def read(path: bytes) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def listed(area: Area, rest: bytes = b"") -> list[bytes]:
    return sorted(os.listdir(raw(area, rest)))


def refused(area: Area, rest: str) -> bool:
    """Whether the server takes no such key; it is put there otherwise."""
    try:
        area.put(rest, rest.encode())
    except botocore.exceptions.ClientError as error:
        if error.response["ResponseMetadata"]["HTTPStatusCode"] >= 500:
            raise
        return True
    return False


@promise("S-34", "S-37")
def test_nasty_names(area: Area) -> None:
    """As files, directories, links and after a rename, before and after a remount, each comes back as it was."""
    files = nasty(area)
    for number, name in enumerate(files):
        write(raw(area, name), b"first")
        write(raw(area, name), str(number).encode())
    os.mkdir(raw(area, b"dirs"))
    names = [utf8_prefix(name, MINIO_DIRECTORY_MAX) if area.server.name == "minio" else name for name in files]
    for name in names:
        os.mkdir(raw(area, b"dirs/" + name))
        write(raw(area, b"dirs/" + name + b"/inner"), name)
    os.mkdir(raw(area, b"links"))
    for name in files:
        os.symlink(b"../" + name, raw(area, b"links/" + name))
    area.mount.remount()
    assert listed(area) == sorted((*files, b"dirs", b"links"))
    assert listed(area, b"dirs") == sorted(names)
    assert listed(area, b"links") == sorted(files)
    for name in names:
        assert read(raw(area, b"dirs/" + name + b"/inner")) == name
    for number, name in enumerate(files):
        assert read(raw(area, name)) == str(number).encode()
        assert os.readlink(raw(area, b"links/" + name)) == b"../" + name
        assert read(raw(area, b"links/" + name)) == str(number).encode()
    for name, directory in zip(files, names, strict=True):
        os.rename(raw(area, name), raw(area, b"dirs/" + directory + b"/moved"))
        os.unlink(raw(area, b"links/" + name))
    assert listed(area) == [b"dirs", b"links"]
    assert listed(area, b"dirs/" + names[11]) == [b"inner", b"moved"]


@promise("S-34", "S-35", "S-38")
def test_names_that_are_too_long(area: Area) -> None:
    """256 bytes (versitygw: 228), of a directory 247 on MinIO, and a path whose key is over 1,024, are ENAMETOOLONG;
    all else goes on."""
    most = longest(area)
    assert os.statvfs(area.path).f_namemax == most
    fits, more = raw(area, b"x" * most), raw(area, b"x" * (most + 1))
    for content in (b"first", b"second"):
        write(fits, content)
        assert read(fits) == content
    for call in (lambda path: write(path, b""), os.mkdir, lambda path: os.symlink(b"t", path), os.mkfifo):
        fails(errno.ENAMETOOLONG, call, more)
    fails(errno.ENAMETOOLONG, os.stat, raw(area, b"x" * 256))
    fails(errno.ENAMETOOLONG, os.rename, fits, more)
    if area.server.name == "versitygw":
        area.put("y" * 255, b"of another tool")
        settle()
        assert read(raw(area, b"y" * 255)) == b"of another tool"
        os.rename(raw(area, b"y" * 255), raw(area, b"z"))
    escaped = b"\xff" * 90  # 270 bytes in the key, which neither server takes; 75 fit
    write(raw(area, escaped[:75]), b"x")
    fails(errno.ENAMETOOLONG, write, raw(area, escaped), b"x")
    fails(errno.ENAMETOOLONG, os.mkdir, raw(area, escaped))
    deep = b"/".join([b"d" * 200] * 4)
    os.makedirs(raw(area, deep))
    write(raw(area, deep + b"/fits"), b"x")
    fails(errno.ENAMETOOLONG, write, raw(area, deep + b"/" + b"l" * 250), b"x")
    fails(errno.ENAMETOOLONG, os.mkdir, raw(area, deep + b"/" + b"l" * 250))
    assert listed(area, deep) == [b"fits"]
    most = min(MINIO_DIRECTORY_MAX, most)
    os.mkdir(raw(area, b"e" * most))
    fails(errno.ENAMETOOLONG, os.mkdir, raw(area, b"f" * (most + 1)))
    fails(errno.ENAMETOOLONG, os.rename, raw(area, b"e" * most), raw(area, b"f" * (most + 1)))
    before = listed(area)
    area.mount.remount()
    assert {escaped[:75], b"e" * most} <= set(before)
    assert not {escaped, b"f" * (most + 1)} & set(before)
    assert listed(area) == before


@promise("S-38")
@pytest.mark.parametrize("key", ["a//b", "a/./b", "a/../b", "x//"])
def test_odd_keys_on_servers_that_take_no_such(area: Area, key: str) -> None:
    """MinIO refuses them; versitygw refuses or resolves them as a disk does. What is beside them is shown."""
    area.put("beside", b"x")
    if not refused(area, key):
        assert area.server.name == "versitygw"
        assert key not in area.keys()  # noqa: SIM118  (keys of the bucket, no dict)
    settle()
    shown = {"a//b": b"a", "a/./b": b"a", "a/../b": b"b"}.get(key) if area.server.name == "versitygw" else None
    assert listed(area) == sorted(filter(None, (b"beside", shown)))


@promise("S-38")
def test_a_file_beside_a_directory(area: Area) -> None:
    """Versitygw refuses `a` beside `a/b` both ways; MinIO takes both and lists `a` alone."""
    area.put("a", b"object")
    assert refused(area, "a/b") == (area.server.name == "versitygw")
    settle()
    assert listed(area) == [b"a"]
    assert read(raw(area, b"a")) == b"object"
    fails(errno.EEXIST, os.mkdir, raw(area, b"a"))
    fails(errno.ENOTDIR, write, raw(area, b"a/c"), b"x")


@promise("S-38")
@pytest.mark.parametrize("transport", ["kernel", "libfuse"])
def test_a_directory_in_the_way_of_a_new_file(mount_with: Mounter, transport: str) -> None:
    """versitygw has what another client made, and the mount believes that nothing is there: the close says so."""
    with mount_with(transport=transport, metadataTTL="600s") as mount:
        assert os.listdir(mount.path) == []
        mount.objects.put("d/e", b"theirs")
        fails(errno.EEXIST, (mount.path / "d").write_bytes, b"ours")
        assert (mount.path / "d").read_bytes() == b"ours"  # not lost; another name lets it be stored
        (mount.path / "d").rename(mount.path / "other")
        assert mount.objects.get("other") == b"ours"
        assert mount.objects.get("d/e") == b"theirs"
