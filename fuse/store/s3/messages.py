"""What is asked of a server and what comes back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ..base import Body, FilePart

SMALL_BYTES = 64 << 10
"""The most that an answer may have that is neither an object nor a listing, and that is read of a refusal."""


class Answer(NamedTuple):
    """status, headers by lower-case name, and the whole body: b"" when it went to the request's outlet."""

    status: int
    headers: Mapping[str, str]
    body: Body


class Outlet(NamedTuple):
    """Where a large body goes while it comes. status: of the answer that is meant, others are kept whole.

    start: where in the object the body begins: it is cut at whole MiB of that. take: given the headers, the body's
    length, where in the body these bytes are, and the bytes.
    """

    status: int
    start: int
    take: Callable[[Mapping[str, str], int, int, Body], None]


@dataclass(slots=True, kw_only=True)
class Request:
    """What to ask, not signed yet. query: not encoded; repeatable: sending it twice is as good as once."""

    method: str
    key: str = ""
    query: Sequence[tuple[str, str]] = ()
    headers: Mapping[str, str] = field(default_factory=dict)
    body: Body | FilePart = b""
    repeatable: bool = True
    expected_bytes: int = 0
    """About how large the answer is, for the deadline."""
    is_long: bool = False
    """The server copies or joins objects before it answers."""
    outlet: Outlet | None = None
    most_bytes: int = SMALL_BYTES
    """The largest body that is taken from a server that says yes: whatever else it sends is not read."""
