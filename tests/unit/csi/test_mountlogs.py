"""datastore.csi.mountdaemon.mountlogs: what a mount logs, and what a hacked one may make of that."""

from __future__ import annotations

from pathlib import Path

import pytest

from datastore.csi.mountdaemon.daemon import MountState
from datastore.csi.mountdaemon.mountlogs import LINES, MountLogs
from datastore.logs import FIELDS
from tests.promises import promise


@pytest.fixture
def mount(tmp_path: Path) -> MountState:
    return MountState(volume_id="team/data/1", mountpoint="/m", state_dir=str(tmp_path), supervisor_pid=1, server_pid=2)


def repeated(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the lines that were repeated since the last call."""
    found = [getattr(each, FIELDS) for each in caplog.records]
    caplog.clear()
    assert {each["volume"] for each in found} <= {"team/data/1"}
    return [str(each.get("line", f"and {each.get('lines')} more")) for each in found]


@promise("S-123")
def test_warnings_and_errors_are_repeated_once(mount: MountState, caplog: pytest.LogCaptureFixture) -> None:
    logs, path = MountLogs(), Path(mount.state_dir, "mount.log")
    logs.look([mount])
    path.write_text("T1 INFO a started\nT2 WARNING a slow\nT3 ERROR a fail")
    logs.look([mount])
    assert repeated(caplog) == ["T2 WARNING a slow"]
    with path.open("a") as file:
        file.write("ed\n")
    logs.look([mount])
    logs.look([mount])
    assert repeated(caplog) == ["T3 ERROR a failed"]
    path.write_text("T4 ERROR a\n")
    logs.look([mount])
    assert repeated(caplog) == ["T4 ERROR a"], "it was trimmed"


@promise("S-123")
def test_a_hacked_mount_neither_fills_the_log_nor_forges_a_line(
    mount: MountState, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    logs, path = MountLogs(), Path(mount.state_dir, "mount.log")
    path.write_bytes(b"T ERROR \x1b[2J\rx\xff\n")
    logs.look([mount])
    assert repeated(caplog) == ["T ERROR ?[2J?x\\xff"]
    with path.open("a") as file:
        file.write("".join(f"T ERROR {number}\n" for number in range(20_000)))
    logs.look([mount])
    first, *lines = repeated(caplog)
    assert first.startswith("and ")
    assert lines == [f"T ERROR {number}" for number in range(20_000 - LINES, 20_000)]
    (tmp_path / "secret").write_text("T ERROR secret\n")
    path.unlink()
    path.symlink_to(tmp_path / "secret")
    logs.look([mount])
    assert repeated(caplog) == []
