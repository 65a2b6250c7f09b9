"""Attributes of a file and their form as user metadata of an object. Pure.

The headers are those of s3fs (x-amz-meta-mode, uid, gid, mtime, ctime, atime, xattr), so that either tool sees what
the other wrote: mode is decimal with the type bits, times are seconds with nanoseconds after a dot, xattr is
percent-encoded JSON of name -> base64. A link target in geesefs's metadata (`--symlink-target`, percent-encoded) is
read; links of this mount are not written so. Metadata of other tools is kept.
"""

from __future__ import annotations

import base64
import binascii
import json
import stat
from collections.abc import Mapping
from functools import lru_cache
from mimetypes import MimeTypes
from types import MappingProxyType
from typing import NamedTuple
from urllib.parse import quote, unquote, unquote_to_bytes

from ...ops import NOW, SetAttr
from ...store.base import CHANGED

DIRECTORY_TYPE = "application/x-directory"
FILE_TYPE = "application/octet-stream"
_KNOWN_TYPES = MimeTypes()
"""Python's own table of content types, which is the same on every machine, whatever /etc/mime.types says."""

_NONE: Mapping[bytes, bytes] = MappingProxyType({})
_NO_EXTRA: Mapping[str, str] = MappingProxyType({})
_OURS = frozenset(("mode", "uid", "gid", "mtime", CHANGED, "atime", "xattr"))
_TIMES = frozenset(("mtime", CHANGED, "atime"))
_GEESEFS_TARGET = "--symlink-target"
_TIME_LIMIT_NS = (1 << 63) * 1_000_000_000
"""Larger times in metadata are ignored: their seconds would not fit the 64 bits that the kernel has for them."""
_TYPES = frozenset((stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK, stat.S_IFIFO, stat.S_IFSOCK, stat.S_IFCHR, stat.S_IFBLK))
_DEVICE_NUMBER = "rdev"
"""The name of the metadata with a device's number. s3fs writes only the type of a device, and leaves this as it is."""


class Attributes(NamedTuple):
    """What chmod, chown, utimensat and setxattr change. Times are nanoseconds since the epoch."""

    mode: int
    uid: int
    gid: int
    atime_ns: int
    mtime_ns: int
    ctime_ns: int
    xattrs: Mapping[bytes, bytes] = _NONE
    extra: Mapping[str, str] = _NO_EXTRA
    """Metadata of other tools, kept as it is."""
    target: bytes | None = None
    """The link target, where another tool put it in the metadata."""
    content_type: str = FILE_TYPE

    def as_device(self, number: int) -> Attributes:
        """Return these attributes with the number of a device, as mknod(2) takes it."""
        return self._replace(extra={**self.extra, _DEVICE_NUMBER: str(number)})

    @property
    def device(self) -> int:
        """The number of a device; 0 for everything that is not a device."""
        is_device = stat.S_ISCHR(self.mode) or stat.S_ISBLK(self.mode)
        return _number(self.extra.get(_DEVICE_NUMBER), 0) if is_device else 0


class Defaults(NamedTuple):
    """The attributes of an object without metadata, and the group that the mount shows."""

    uid: int
    gid: int
    file_mode: int = 0o644
    directory_mode: int = 0o755
    group: int | None = None
    """The group that everything but a link is shown with; it may do what the owner may. None: as the object says."""

    def of(self, kind: int, time_ns: int) -> Attributes:
        """Return the attributes of an object without metadata; kind is a file type as in stat.S_IFREG."""
        permissions, content_type = self.file_mode, FILE_TYPE
        if kind == stat.S_IFDIR:
            permissions, content_type = self.directory_mode, DIRECTORY_TYPE
        elif kind == stat.S_IFLNK:
            permissions = 0o777
        mode, times = kind | permissions, (time_ns, time_ns, time_ns)
        return self.seen(Attributes(mode, self.uid, self.gid, *times, _NONE, _NO_EXTRA, None, content_type))

    def seen(self, attributes: Attributes) -> Attributes:
        """Return an object's attributes as this mount shows them: with the group, if the mount has one."""
        if self.group is None or stat.S_ISLNK(attributes.mode):
            return attributes
        # As the kubelet does for an fsGroup on a disk, but without a request for every object.
        mode = attributes.mode | (attributes.mode & stat.S_IRWXU) >> 3
        if stat.S_ISDIR(mode):
            mode |= stat.S_ISGID
        return attributes._replace(gid=self.group, mode=mode)


def type_of(name: bytes) -> str:
    """Return the content type of a new file by its extension; for a compressed file not that of what is inside."""
    return _type_of(name.lstrip(b".").partition(b".")[2])


@lru_cache(256)
def _type_of(ending: bytes) -> str:
    """ending: the part of the name behind the first dot that is not at its beginning."""
    kind, coding = _KNOWN_TYPES.guess_type("./x." + ending.decode("utf-8", "replace"))
    if coding is not None:
        return "application/gzip" if coding == "gzip" else FILE_TYPE
    return kind or FILE_TYPE


def to_metadata(attributes: Attributes) -> dict[str, str]:
    """Return the user metadata of an object with these attributes."""
    mode, uid, gid, atime_ns, mtime_ns, ctime_ns, xattrs, extra, _, _ = attributes
    metadata = {**extra, "mode": str(mode), "uid": str(uid), "gid": str(gid)}
    metadata |= {"mtime": _seconds(mtime_ns), CHANGED: _seconds(ctime_ns), "atime": _seconds(atime_ns)}
    if xattrs:
        names = ((name.decode("utf-8", "surrogateescape"), content) for name, content in xattrs.items())
        encoded = {name: base64.b64encode(content).decode() for name, content in names}
        metadata["xattr"] = quote(json.dumps(encoded, separators=(",", ":")), safe="/")
    return metadata


def without_times(metadata: Mapping[str, str]) -> dict[str, str]:
    """Drop the times, for an upload that begins before the last write: its LastModified takes their place."""
    return {name: text for name, text in metadata.items() if name not in _TIMES}


def from_metadata(metadata: Mapping[str, str], kind: int, defaults: Attributes, content_type: str = "") -> Attributes:
    """Return an object's attributes; what is absent or does not parse comes from `defaults`. kind: the type that the
    key shows (S_IFREG when the key shows nothing more).
    """
    said = metadata.get
    mode = _number(said("mode"), defaults.mode)
    target = unquote_to_bytes(metadata[_GEESEFS_TARGET]) if _GEESEFS_TARGET in metadata else None
    seen = stat.S_IFMT(mode)
    if kind != stat.S_IFREG or seen not in _TYPES or seen == stat.S_IFDIR:
        seen = kind
    if target is not None and kind == stat.S_IFREG:
        seen = stat.S_IFLNK
    uid, gid = _number(said("uid"), defaults.uid), _number(said("gid"), defaults.gid)
    mtime_ns = _nanoseconds(said("mtime"), defaults.mtime_ns)
    atime_ns = _nanoseconds(said("atime"), mtime_ns)
    ctime_ns = _nanoseconds(said(CHANGED), max(mtime_ns, defaults.ctime_ns))
    xattrs, extra = _xattrs(said("xattr")), _NO_EXTRA
    if not metadata.keys() <= _OURS:
        extra = {name: text for name, text in metadata.items() if name not in _OURS}
    mode, content_type = seen | stat.S_IMODE(mode), content_type or defaults.content_type
    return Attributes(mode, uid, gid, atime_ns, mtime_ns, ctime_ns, xattrs, extra, target, content_type)


def changed(attributes: Attributes, changes: SetAttr, now_ns: int) -> Attributes:
    """Return the attributes after a setattr, whose size is ignored; ctime becomes now."""
    mode = attributes.mode
    if changes.mode is not None:
        mode = stat.S_IFMT(mode) | stat.S_IMODE(changes.mode)
    if changes.kill_suidgid:
        mode = without_suidgid(mode)
    uid = attributes.uid if changes.uid is None else changes.uid
    gid = attributes.gid if changes.gid is None else changes.gid
    atime_ns = _time(changes.atime_ns, attributes.atime_ns, now_ns)
    mtime_ns = _time(changes.mtime_ns, attributes.mtime_ns, now_ns)
    return attributes._replace(mode=mode, uid=uid, gid=gid, atime_ns=atime_ns, mtime_ns=mtime_ns, ctime_ns=now_ns)


def without_suidgid(mode: int) -> int:
    """Drop setuid from a file's mode after a change by a caller that may not keep it; setgid only if S_IXGRP is set."""
    if stat.S_IFMT(mode) == stat.S_IFDIR:
        return mode
    mode &= ~stat.S_ISUID
    return mode & ~stat.S_ISGID if mode & stat.S_IXGRP else mode


def _time(wanted: int | None, present: int, now_ns: int) -> int:
    if wanted is None:
        return present
    return now_ns if wanted == NOW else wanted


@lru_cache(256)
def _seconds(time_ns: int) -> str:
    seconds, rest = divmod(time_ns, 1_000_000_000)
    return f"{seconds}.{rest:09d}"


def _nanoseconds(text: str | None, default: int) -> int:
    if not text:
        return default
    whole, _, rest = text.partition(".")
    if len(rest) != 9:
        rest = rest[:9].ljust(9, "0")
    try:
        time_ns = int(whole) * 1_000_000_000 + int(rest)
    except ValueError:
        return default
    return time_ns if abs(time_ns) < _TIME_LIMIT_NS else default


def _number(text: str | None, default: int) -> int:
    if text is None or not (text.isascii() and text.isdecimal()):
        return default
    number = int(text)
    return number if number < 1 << 32 else default


def _xattrs(text: str | None) -> Mapping[bytes, bytes]:
    if not text:
        return _NONE
    try:
        decoded = json.loads(unquote(text))
        return {name.encode("utf-8", "surrogateescape"): base64.b64decode(value) for name, value in decoded.items()}
    except (ValueError, AttributeError, TypeError, binascii.Error):
        return _NONE
