"""Names on a real mount (docs/SEMANTICS.md, Names)."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import botocore.exceptions
import pytest

from tests.mount.conftest import Mounter, new_bucket
from tests.mount.mounts import TTL, Area, Mount, fails, mounted, settle
from tests.promises import promise
from tests.servers import Server

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


@promise("S-34", "S-37")
def test_keys_are_the_names(area: Area) -> None:
    """What is UTF-8 is the key as it is; other bytes are U+F000 + byte, and so is the dot of a name like a link's."""
    for name in ("two words", "emoji 🎉", "%20", "a+b"):
        (area.path / name).write_bytes(name.encode())
        assert area.get(name) == name.encode()
    write(raw(area, b"caf\xe9"), b"latin")
    assert area.get("caf\uf0e9") == b"latin"
    write(raw(area, b"z.rclonelink"), b"content")
    assert area.get("z\uf02erclonelink") == b"content"
    write(raw(area, "\uf041".encode()), b"private")
    assert area.get("\uf0ef\uf081\uf081") == b"private"


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


@pytest.fixture(scope="module", params=["kernel", "libfuse"])
def any_key(request: pytest.FixtureRequest, moto: Server, clean_environment: Path) -> Iterator[Mount]:
    """A mount of a server that takes every key, as AWS does (moto); neither versitygw nor MinIO does."""
    with mounted(moto, new_bucket(moto), clean_environment, request.param, metadataTTL=TTL) as mount:
        yield mount


ODD = {
    "a//b": "a/\uf02f/b",
    "c/./b": "c/\uf02e/b",
    "d/../b": "d/\uf02e\uf02e/b",
    "/e": "\uf02f/e",
    "f///g": "f/\uf02f/\uf02f/g",
}


@promise("S-36")
def test_keys_that_no_name_can_spell(any_key: Mount) -> None:
    """They are shown below names of their own, and everything works there; their siblings are untouched."""
    bucket, root = any_key.objects, any_key.path
    for key in ODD:
        bucket.put(key, key.encode())
    bucket.put("a/beside", b"x")
    settle()
    assert sorted(os.listdir(root)) == sorted(("a", "c", "d", "f", "\uf02f"))
    assert sorted(os.listdir(root / "a")) == ["beside", "\uf02f"]
    for key, shown in ODD.items():
        assert (root / shown).read_bytes() == key.encode()
        (root / shown).write_bytes(b"changed")
        assert bucket.get(key) == b"changed"
        (root / shown).with_name("new").write_bytes(b"new")
        assert bucket.get(key[:-1] + "new") == b"new"
        (root / shown).unlink()
        assert not bucket.exists(key)
        fails(errno.EINVAL, os.mkdir, (root / shown).parent / "\uf02f")
    (root / "f/\uf02f/\uf02f/new").rename(root / "f/moved")
    assert bucket.get("f/moved") == b"new"
    fails(errno.EINVAL, os.rename, root / "c", root / "a/\uf02e")


@promise("S-37")
def test_all_of_a_file_beside_a_directory(any_key: Mount) -> None:
    """The directory is `a`, the object is `a` followed by U+F000, which can be read, written and removed."""
    bucket, root = any_key.objects, any_key.path
    bucket.put("same", b"object")
    bucket.put("same/below", b"below")
    settle()
    aside = root / "same\uf000"
    assert {"same", aside.name} <= set(os.listdir(root))
    assert os.listdir(root / "same") == ["below"]
    assert aside.read_bytes() == b"object"
    aside.write_bytes(b"changed")
    assert bucket.get("same") == b"changed"
    aside.unlink()
    assert not bucket.exists("same")
    assert bucket.get("same/below") == b"below"


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


@promise("S-37")
def test_a_link_beside_a_file_of_its_name(area: Area) -> None:
    """`x` is the file; `x.rclonelink` is shown as a file under its own name."""
    area.put("x", b"file")
    area.put("x.rclonelink", b"target")
    area.put("y.rclonelink", b"target")
    settle()
    assert listed(area) == [b"x", b"x.rclonelink", b"y"]
    assert read(raw(area, b"x")) == b"file"
    assert read(raw(area, b"x.rclonelink")) == b"target"
    assert os.readlink(raw(area, b"y")) == b"target"


@promise("S-01", "S-03")
def test_markers_of_other_tools(area: Area) -> None:
    """A marker of any content type is a directory; deleting it is rmdir."""
    area.put("plain/", b"", "application/octet-stream")
    area.put("typed/", b"", "text/html")
    settle()
    assert listed(area) == [b"plain", b"typed"]
    assert listed(area, b"typed") == []
    os.rmdir(raw(area, b"typed"))
    assert area.keys() == ["", "plain/"]
