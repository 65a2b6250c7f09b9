"""A mount without a server that somebody takes away by force: its keeper ends in order."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.mount.engine import kept, spec
from tests.patience import eventually

pytestmark = [pytest.mark.fuse]


def test_a_forced_unmount_while_callers_are_refused(tmp_path: Path) -> None:
    """S-61: what it has told and kept is taken away, as after any other unmount, and no server is tried any more."""
    flag = tmp_path / "broken"
    unlucky = spec(tmp_path, labels={"broken while": str(flag)})
    with kept(unlucky, "--down-limit", "1") as keeper:
        flag.touch()
        os.kill(keeper.server_pid(), signal.SIGKILL)
        eventually(lambda: "is refused" in keeper.log(), "callers are refused")
        subprocess.run(["umount", "-f", str(keeper.path)], check=False)
        subprocess.run(["umount", "-f", "-l", str(keeper.path)], check=False)
        assert keeper.wait() == 0
        assert "Traceback" not in keeper.log()
        assert sorted(os.listdir(keeper.state)) == ["lock", "mount.log"]
