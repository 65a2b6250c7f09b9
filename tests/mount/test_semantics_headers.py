"""What other tools say of an object beside its bytes, on a real mount (docs/SEMANTICS.md, Attributes)."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.mount.mounts import Area, settle
from tests.promises import promise
from tests.servers import boto_client

pytestmark = pytest.mark.fuse
WAYS = ("versitygw-kernel", "minio-kernel")

HEADERS = {
    "ContentType": "text/markdown",
    "ContentEncoding": "gzip",
    "CacheControl": "max-age=60",
    "ContentDisposition": 'attachment; filename="a b.md"',
    "ContentLanguage": "de",
}
TAGS = {"team": "vision audio", "cost": "1+1=2"}
LARGE = bytes(12 << 20)
"""Is sent in parts."""


def append(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"more")


def rename_while_open(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"more")
        path.rename(path.with_name("moved"))
    path.with_name("moved").rename(path)


def append_after_a_rename(path: Path) -> None:
    path.rename(path.with_name("moved"))
    append(path.with_name("moved"))
    path.with_name("moved").rename(path)


CHANGES: dict[str, tuple[bytes, Callable[[Path], object]]] = {
    "append": (b"x", append),
    "append-to-large": (LARGE, append),
    "write-anew": (b"x", lambda path: path.write_bytes(b"more")),
    "write-anew-large": (b"x", lambda path: path.write_bytes(LARGE + b"more")),
    "truncate": (b"xyz", lambda path: os.truncate(path, 2)),
    "chmod": (b"x", lambda path: path.chmod(0o600)),
    "touch": (b"x", lambda path: os.utime(path, (5, 5))),
    "setfattr": (b"x", lambda path: os.setxattr(path, "user.a", b"1")),
    "rename-while-open": (b"x", rename_while_open),
    "append-after-a-rename": (b"x", append_after_a_rename),
}


def told(area: Area, name: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Headers and tags of an object, for another tool."""
    head = area.head(name)
    tags = boto_client(area.server).get_object_tagging(Bucket=area.bucket, Key=area.key(name))["TagSet"]
    return {name: head.get(name) for name in HEADERS}, {tag["Key"]: tag["Value"] for tag in tags}


@promise("S-164")
def test_headers_and_tags_survive(area: Area) -> None:
    """Those that another tool set, each change here, in the store, whether looked at or listed before."""
    client = boto_client(area.server)
    tagging = "team=vision%20audio&cost=1%2B1%3D2"
    for name, (body, _) in CHANGES.items():
        client.put_object(Bucket=area.bucket, Key=area.key(name), Body=body, Tagging=tagging, **HEADERS)
    settle()
    assert sorted(os.listdir(area.path)) == sorted(CHANGES)
    for name, (_, change) in CHANGES.items():
        change(area.path / name)
        assert told(area, name) == (HEADERS, TAGS), name
    area.mount.remount()
    for name in ("append", "chmod", "rename-while-open"):
        append(area.path / name)
        assert told(area, name) == (HEADERS, TAGS), name


@promise("S-164")
def test_content_type_follows_the_extension(area: Area) -> None:
    """Of a new file, however it is made; what is renamed keeps its own."""
    for name, kind in (
        ("page.html", "text/html"),
        ("IMAGE.PNG", "image/png"),
        ("weights.json", "application/json"),
        ("http:page.css", "text/css"),
        ("data.tar.gz", "application/gzip"),
        ("data.csv.xz", "application/octet-stream"),
        ("plain", "application/octet-stream"),
        ("weights.safetensors", "application/octet-stream"),
    ):
        (area.path / name).write_bytes(b"x")
        os.close(os.open(area.path / f"x{name}", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        (area.path / name).rename(area.path / "renamed.txt")
        for made in ("renamed.txt", f"x{name}"):
            assert area.head(made)["ContentType"] == kind, name
