"""Changed settings reach the mount's server, however late it starts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from datastore.api.mountspec import MountSpec
from datastore.api.source import S3Location
from datastore.controlclient import Answer
from datastore.csi.mountdaemon import daemon as mountdaemon
from datastore.csi.mountdaemon.cgroups import Cgroup, Cgroups
from datastore.csi.mountdaemon.daemon import MountDaemon
from datastore.csi.mountdaemon.supervisor import MountRequest, SupervisedMount
from tests.promises import promise


@promise("S-139")
def test_settings_that_no_server_received_are_sent_by_the_next_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that was started with the old settings took longer to start than a call waits."""
    spec = MountSpec(
        name="v", mountpoint=str(tmp_path / "m"), source=S3Location(bucket="b"), state_dir=str(tmp_path / "state"),
        cache_dir=str(tmp_path / "cache"),
    )  # fmt: skip
    mount = SupervisedMount(MountRequest(volume_id="v", spec=spec), Cgroup(None), lambda _: None)
    daemon = MountDaemon(Cgroups(own=tmp_path / "none"))
    answers: list[Answer] = [{}, {"ok": True}]
    asked: list[int | None] = []

    def told(mount: SupervisedMount) -> Answer:
        asked.append(mount.spec.group)
        return answers.pop(0)

    monkeypatch.setattr(mountdaemon, "_told", told)
    monkeypatch.setattr(mountdaemon, "TOLD_S", 0.0)
    for _ in range(3):
        daemon._renew(mount, replace(spec, group=2000))

    assert asked == [2000, 2000]
