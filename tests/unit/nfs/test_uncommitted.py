"""What a file has that its server has not committed, while another thread settles it."""

from __future__ import annotations

from datastore.fuse.nfs.client import Credentials
from datastore.fuse.nfs.uncommitted import Uncommitted
from tests.promises import promise


class SettledMeanwhile(Uncommitted):
    """The server's answer, that writes are lost, comes right after the first look at what is known to be lost."""

    @property
    def _lost(self) -> bool:
        before, self.__dict__["_lost"] = self.__dict__["_lost"], True
        self._doubt = None
        return bool(before)

    @_lost.setter
    def _lost(self, lost: bool) -> None:
        self.__dict__["_lost"] = lost


@promise("S-262")
def test_what_is_lost_is_never_overlooked() -> None:
    """A close that asks while it becomes known is to say so."""
    assert SettledMeanwhile(b"handle", Credentials(0, 0), doubt=1)
