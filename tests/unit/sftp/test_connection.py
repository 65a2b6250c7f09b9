"""The end of a connection, without a server."""

from __future__ import annotations

import asyncio
import errno
import threading
from typing import Any

import pytest

from datastore.api.source import SFTPLocation
from datastore.errors import Unreachable
from datastore.fuse.sftp.connection import Connection
from tests.mount.mounts import error_of
from tests.promises import promise
from tests.servers import free_port

LIMIT_S = 60.0


@promise("S-277")
def test_a_call_that_begins_when_the_mount_ends_is_ended_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has seen that the mount goes on, and is not yet known to the thread that would carry it out."""
    connection = Connection(SFTPLocation(host="127.0.0.1", port=1, path="/p"))
    connection.start(wait=False)
    ended = threading.Thread(target=connection.stop)
    begin = asyncio.run_coroutine_threadsafe

    def begin_late(coroutine: Any, loop: Any) -> Any:
        if not ended.ident:
            ended.start()
            ended.join(1.0)  # it has to wait for us
        return begin(coroutine, loop)

    async def never(_sftp: object, _repeated: bool) -> None:
        raise AssertionError("there is no server")

    monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", begin_late)
    seen: list[int] = []
    calling = threading.Thread(target=lambda: seen.append(error_of(connection.call, "lstat", never)), daemon=True)
    calling.start()
    calling.join(LIMIT_S)
    ended.join(LIMIT_S)
    assert seen == [errno.ENOTCONN]


@promise("S-278")
def test_a_server_that_can_not_be_reached_is_named_with_its_port() -> None:
    connection = Connection(SFTPLocation(host="127.0.0.1", port=free_port(), path="/p"))
    with pytest.raises(
        Unreachable, match=f"the SSH server 127.0.0.1, port {connection.location.port}, can't be reached"
    ):
        connection.start(wait=True)
    connection.stop()
