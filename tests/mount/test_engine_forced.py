"""A mount without a server that somebody takes away by force: its supervisor ends in order."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.mount.engine import kept, spec
from tests.patience import eventually
from tests.promises import promise

pytestmark = [pytest.mark.fuse]


@promise("S-61")
def test_a_forced_unmount_while_callers_are_refused(tmp_path: Path) -> None:
    """What it has told and kept is taken away, as after any other unmount, and no server is tried any more."""
    flag = tmp_path / "broken"
    unlucky = spec(tmp_path, labels={"broken while": str(flag)})
    with kept(unlucky, "--down-limit", "1") as supervisor:
        flag.touch()
        os.kill(supervisor.server_pid(), signal.SIGKILL)
        eventually(lambda: "is refused" in supervisor.log(), "callers are refused")
        subprocess.run(["umount", "-f", str(supervisor.path)], check=False)
        subprocess.run(["umount", "-f", "-l", str(supervisor.path)], check=False)
        assert supervisor.wait() == 0
        assert "Traceback" not in supervisor.log()
        assert sorted(os.listdir(supervisor.state)) == ["lock", "mount.log"]
