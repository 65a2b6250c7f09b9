"""`datastore restart` where it can't be done (docs/SEMANTICS.md, S-59)."""

from __future__ import annotations

from pathlib import Path

import pytest

from datastore.cli import inspection, restart
from datastore.errors import DatastoreError
from datastore.mounting.records import MountRecord
from tests.promises import promise


def record(**changes: object) -> MountRecord:
    fixed = {"state_dir": Path("/none"), "name": "work", "mountpoint": "/m", "location": "s3://b/"}
    return MountRecord(**{**fixed, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "alive", "words"),
    [
        ({"in_kernel": "bind"}, True, "no server of ours"),
        ({"supervisor_pid": 7}, False, "has crashed"),
        ({"supervisor_pid": 7, "transport": "libfuse"}, True, "--transport libfuse"),
        ({"supervisor_pid": 7, "location": "glusterfs://h/v"}, True, "GlusterFS's own client serves it"),
    ],
)
def test_restart_says_why_it_is_refused(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, object], alive: bool, words: str
) -> None:
    monkeypatch.setattr(restart, "is_server", lambda _: alive)
    monkeypatch.setattr(restart, "find", lambda _: record(**changes))
    with pytest.raises(DatastoreError, match=words):
        restart.restart_command("work")


@promise("S-59")
def test_status_says_whether_it_is_possible() -> None:
    assert "libfuse" in inspection.inspect(record(supervisor_pid=7, transport="libfuse"))["restart"]
    assert inspection.inspect(record(supervisor_pid=7))["restart"] == "possible"
    told = inspection.inspect(record(supervisor_pid=7, server_pid=8, trouble="no mount server can be started: why"))
    assert (told["supervisorPid"], told["serverPid"], told["trouble"]) == (7, 8, "no mount server can be started: why")
