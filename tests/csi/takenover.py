"""What a hacked mount server can reach, for every kind of source: see attacking.py."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from datastore import controlclient
from datastore.api.mountspec import from_json
from datastore.csi.mountdaemon.protocol import handles_of
from datastore.fuse.confinement import CAPABILITIES
from tests.csi.driver import Driver, Pod

ATTACK_S = 100


def check_confined(driver: Driver, pod: Pod) -> int:
    """Return the pid of a volume's server. Errors: AssertionError unless all confinements are in force."""
    state = driver.state(pod.volume_id)
    spec = next(each.spec for each in handles_of(driver.settings.daemon_socket) if each.volume_id == pod.volume_id)
    status = dict(line.split(":\t", 1) for line in Path(f"/proc/{state.server_pid}/status").read_text().splitlines())
    assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
    held = {int(status[name], 16) for name in ("CapEff", "CapPrm", "CapBnd")}
    assert held == {CAPABILITIES.get(spec.source.kind, 0)}
    assert controlclient.brief_status(Path(state.state_dir), 60.0)["unconfined"] == []
    return state.server_pid


def check_reaches_nothing(driver: Driver, own: Pod, other: Pod) -> None:
    """Try all of attacking.py as the server of `own`. Errors: AssertionError when it reaches another volume."""
    states = [driver.state(each.volume_id) for each in (own, other)]
    specs = {each.volume_id: from_json(each.spec.to_json()) for each in handles_of(driver.settings.daemon_socket)}
    neighbour = specs[other.volume_id]
    with tempfile.NamedTemporaryFile("w+", dir="/var/tmp", prefix="datastore-") as file:
        file.write("secret")
        file.flush()
        given = {
            "own": specs[own.volume_id].to_json(),
            "other": {
                "state_dir": neighbour.state_dir,
                "cache_dir": neighbour.cache_dir,
                "mountpoint": neighbour.mountpoint,
                "server_pid": states[1].server_pid,
            },
            "daemon_pid": driver.mount_daemon.popen.pid if driver.mount_daemon.popen else 0,
            "sockets": {
                "mount daemon": str(driver.settings.daemon_socket),
                "node plugin": str(driver.settings.csi_socket),
                "node plugin for descriptors": str(driver.settings.handles_socket),
                "other server": f"{neighbour.state_dir}/{controlclient.SOCKET}",
            },
            "file": file.name,
        }
        told = subprocess.run(
            [sys.executable, "-m", "tests.csi.attacking"],
            input=json.dumps(given),
            capture_output=True,
            text=True,
            timeout=ATTACK_S,
            check=False,
        )
        assert told.returncode == 0, told.stderr
        answer = json.loads(told.stdout)
        got = {name: how for name, how in answer["attacks"].items() if how != "refused"}
        assert got == {}, got
        assert answer["missing"] == []
        assert answer["worked"] == ["a thread"]
        assert Path(file.name).read_text() == "secret"
    after = [driver.state(each.volume_id).server_pid for each in (own, other)]
    assert after == [each.server_pid for each in states], "nothing was replaced"
