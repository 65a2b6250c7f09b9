"""What the kernel asks a second time by itself, because the first answer was an error: the same call of a program.

It looks a name up again when it could not be revalidated, and reads a page again when reading ahead failed
(fuse_dentry_revalidate and filemap_read in Linux). If the second request waited for the store as long as the first one
did, a call would take twice the time that is promised (S-64).
"""

from __future__ import annotations

from datastore.errors import TransientStoreError
from datastore.retry import Call

from . import abi
from .dispatch import Header

_WITHIN_S = 1.0
"""The kernel asks at once; the machine may be busy."""
_MAX = 256
_AGAIN = frozenset({abi.LOOKUP, abi.READ})
_Key = tuple[int, int, int]
"""opcode, node id, thread of the caller."""


class FollowUps:
    """Requests that failed a moment ago. Threads: the loop's."""

    def __init__(self) -> None:
        self.remembered: dict[_Key, tuple[float, Call]] = {}
        """While it is empty each request is a call of its own."""

    def call_of(self, header: Header, now: float) -> Call:
        """The call that a request of this moment belongs to: one whose first request failed just now, or a new one."""
        failed = self.remembered.pop((header[1], header[3], header[6]), None)
        return failed[1] if failed is not None and now - failed[0] < _WITHIN_S else Call(now)

    def failed(self, header: Header, call: Call, error: BaseException, *, first: bool, now: float) -> None:
        """A request of a call has failed. first: it was the call's first request; a second one has no successor."""
        if first and header[1] in _AGAIN and header[6] and isinstance(error, TransientStoreError):
            if len(self.remembered) >= _MAX:
                self.remembered.clear()
            self.remembered[header[1], header[3], header[6]] = (now, call)
