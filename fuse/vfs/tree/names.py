"""Translates local names (bytes) to segments of keys (text) and back. Pure.

A key is the prefix of the mount and one segment for each path component, joined by '/'. Most names are equal to their
segment. The exceptions (promises S-34 to S-38 of docs/SEMANTICS.md):

- a byte that is not UTF-8 becomes the private-use character U+F000 + byte, and so does a control character, which XML
  listings can't hold (versitygw shows them as U+FFFD), and each byte of U+FFFE and U+FFFF and of a character U+F000 to
  U+F0FF in the name itself, so that nothing is ambiguous;
- a symbolic link `x` is the object `x.rclonelink` (rclone's --links), so a regular file whose name ends that way gets
  its last dot escaped;
- segments of other tools that can't be the name of a directory entry ('' of `a//b`, '.', '..') are shown with their
  characters moved to the same range: U+F02F, U+F02E, U+F02E U+F02E;
- an object `a` beside objects `a/...` is shown as `a` followed by U+F000.
"""

from __future__ import annotations

LINK_SUFFIX = ".rclonelink"
BESIDE_DIRECTORY = "\uf000".encode()
NAME_MAX = 255
"""The most bytes of a name that may be created here; longer names of other tools are still shown."""

_PRIVATE = 0xF000
_PRIVATE_MARKS = (b"\xef\x80", b"\xef\x81", b"\xef\x82", b"\xef\x83")
"""How the characters U+F000 to U+F0FF begin in UTF-8."""
_RESERVED: dict[bytes, str] = {"\uf02f".encode(): "", "\uf02e".encode(): ".", "\uf02e\uf02e".encode(): ".."}
_SHOWN: dict[str, bytes] = {segment: name for name, segment in _RESERVED.items()}


def segment_of(name: bytes, *, directory: bool = False) -> str:
    """Return the key segment for a local name; for a link the caller adds LINK_SUFFIX. A directory may end in it."""
    if name in _RESERVED:
        return _RESERVED[name]
    text = name.decode("utf-8", "surrogateescape")
    if not name.isascii() or not text.isprintable():
        text = "".join(map(_escape, text))
    if text.endswith(LINK_SUFFIX) and not directory:
        text = text[: -len(LINK_SUFFIX)] + chr(_PRIVATE + ord(".")) + LINK_SUFFIX[1:]
    return text


def name_of(segment: str, *, directory: bool = False) -> bytes:
    """Return the local name of a key segment. segment_of() reverses it, except for odd segments of other tools."""
    if segment in _SHOWN:
        return _SHOWN[segment]
    if segment.isascii():
        return segment.encode("ascii")
    raw = segment.encode("utf-8", "surrogateescape")
    plain = b"".join(map(_unescape, segment))
    spoken = b"\0" not in plain and b"/" not in plain and plain not in (b".", b"..", b"")
    return plain if spoken and segment_of(plain, directory=directory) == segment else raw


def creatable(name: bytes) -> bool:
    """Whether this mount may create a name: it must not be one that stands for an odd segment of another tool."""
    return name not in _RESERVED and not name.endswith(BESIDE_DIRECTORY)


def one_key(name: bytes) -> bool:
    """Whether no other key than segment_of(name), as a directory, file or link, can be shown under this name."""
    return not name.endswith(LINK_SUFFIX.encode()) and not any(mark in name for mark in _PRIVATE_MARKS)


def _escape(character: str) -> str:
    code = ord(character)
    if 0xDC80 <= code <= 0xDCFF:
        return chr(_PRIVATE + code - 0xDC00)
    if code < 0x20 or _PRIVATE <= code <= _PRIVATE + 0xFF or code in (0xFFFE, 0xFFFF):
        return "".join(chr(_PRIVATE + byte) for byte in character.encode())
    return character


def _unescape(character: str) -> bytes:
    code = ord(character)
    if _PRIVATE <= code <= _PRIVATE + 0xFF:
        return bytes((code - _PRIVATE,))
    return character.encode("utf-8", "surrogateescape")
