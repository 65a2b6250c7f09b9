"""Edits of a Datastore while pods use it: the pods see no error, and see the new settings."""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from datastore.api.endpoints import EndpointPolicy
from datastore.api.volumecontext import VolumeHandle
from datastore.controlclient import STATUS_BYTES, ask, brief_status
from datastore.csi import request as parse
from datastore.csi.cluster import Cluster, Seen
from datastore.csi.spec import csi_pb2 as csi
from datastore.csi.volumes import Volumes
from datastore.errors import Unreachable
from tests.csi.driver import Driver, Pod, until
from tests.csi.test_survival import Application
from tests.promises import promise

pytestmark = pytest.mark.fuse
Pods = Callable[..., Pod]
STATUS_S = 60.0


def edited(pod: Pod, **settings: Any) -> Pod:
    """Return the same pod with the edited settings."""
    document = json.loads(pod.context["datastore.dev/spec"])
    s3 = {**document["s3"], **settings.pop("s3", {})}
    memory = {"datastore.dev/memory": settings.pop("memory")} if "memory" in settings else {}
    return replace(pod, context={"datastore.dev/spec": json.dumps({**document, "s3": s3, **settings}), **memory})


def server_of(driver: Driver, pod: Pod) -> int:
    return driver.state(pod.volume_id).server_pid


def dirty(state_dir: Path) -> list[str]:
    """Return the names of files that the bucket lacks."""
    return [each["path"] for each in ask(state_dir, {"op": "status"}, STATUS_S, STATUS_BYTES)["dirty"]]


def settle(driver: Driver, pod: Pod, before: int, why: object = "") -> None:
    """Wait until another server serves."""
    until(lambda: server_of(driver, pod) not in {0, before}, f"another server {why}", log=driver.logs)


@promise("S-230")
def test_every_edit_under_a_pod_that_reads_and_writes(driver: Driver, pod: Pods, tmp_path: Path) -> None:
    """One mount takes all edits without an error; a new server applies those that a running one can't."""
    first = pod()
    (first.start() / "work").mkdir()
    mount = os.stat(first.target).st_dev
    at_once = [
        {"capacity": "3Gi"},
        {"metadataTTL": "3s"},
        {"conflict": "fail"},
        {"writeBack": {"maxDelay": "2s"}},
        {"writeBack": {"maxDelay": "1s"}},
        {"cache": {"size": "64Mi"}},
        {"uploadLimit": "10Mi"},
        {"readOnly": True},
    ]
    by_another_server = [
        {"attributes": "listing"},
        {"attributes": "full"},
        {"s3": {"region": "us-east-1"}},
        {"s3": {"forcePathStyle": True}},
        {"memory": "600Mi"},
    ]
    with Application(first.target / "work", tmp_path / "rounds").running() as application:
        settings: Any = {}
        for edit in at_once:
            before = server_of(driver, first)
            settings |= edit
            edited(first, **settings).publish()
            application.goes_on()
            assert server_of(driver, first) == before, edit
        del settings["readOnly"]
        for edit in by_another_server:
            before = server_of(driver, first)
            settings |= edit
            edited(first, **settings).publish()
            settle(driver, first, before, edit)
            application.goes_on()
        edited(first).publish()
        application.goes_on()
    assert os.stat(first.target).st_dev == mount


@promise("S-230", "S-217")
def test_an_edit_is_seen_at_once(
    driver: Driver, pod: Pods, versitygw_put: Callable[[str, bytes], None], stored: Callable[[str], bytes]
) -> None:
    first = pod()
    place = first.start()
    (place / "x").write_text("x")

    edited(first, capacity="3Gi").publish()
    shown = os.statvfs(place)
    assert shown.f_blocks * shown.f_frsize == 3 << 30

    edited(first, conflict="fail").publish()
    file = (place / "x").open("r+")
    file.write("mine")
    versitygw_put("x", b"another client's")
    with pytest.raises(OSError, match="Stale") as refused:
        file.close()
    assert refused.value.errno == errno.ESTALE

    edited(first, writeBack={"maxDelay": "10s"}).publish()
    state_dir = Path(driver.state(first.volume_id).state_dir)
    with (place / "later").open("a"):  # what somebody writes to is not sent yet
        (place / "later").write_text("later")
        brief = brief_status(state_dir, STATUS_S)
        assert "later" in dirty(state_dir)
    unsent = brief["unsent"]
    assert (unsent["files"], unsent["bytes"], unsent["failed"]) == (2, len("mine") + len("later"), 1)
    assert "another client changed this file" in unsent["error"]
    assert "dirty" not in brief
    until(lambda: "later" not in dirty(state_dir), "it is sent")
    assert stored("later") == b"later"
    edited(first).publish()
    (place / "at-close").write_text("at-close")
    assert stored("at-close") == b"at-close"

    before = server_of(driver, first)
    os.setxattr(place / "at-close", "user.a", b"1")
    edited(first, attributes="listing").publish()
    settle(driver, first, before)
    with pytest.raises(OSError, match="not supported"):
        os.getxattr(place / "at-close", "user.a")


@promise("S-230")
def test_metadata_ttl_counts_for_what_is_asked_for_afterwards(
    pod: Pods, versitygw_put: Callable[[str, bytes], None]
) -> None:
    """The kernel uses earlier answers for as long as they said."""
    first = pod(context=edited(pod(), metadataTTL="1h").context)
    place = first.start()
    assert os.listdir(place) == []
    versitygw_put("early", b"x")
    time.sleep(1.5)
    assert not (place / "early").exists()
    edited(first, metadataTTL="1s").publish()
    time.sleep(1.5)
    versitygw_put("late", b"x")
    until(lambda: sorted(os.listdir(place)) == ["early", "late"], "it is listed")
    assert (place / "late").read_bytes() == b"x"


@promise("S-230")
def test_a_pod_that_starts_after_read_only_was_set_cannot_write_and_another_goes_on(pod: Pods) -> None:
    first, second = pod("first"), pod("second")
    (first.start() / "x").write_text("x")
    edited(first, readOnly=True).publish()
    edited(second, readOnly=True).start()
    with pytest.raises(OSError, match="Read-only"):
        (second.target / "y").write_text("y")
    assert (second.target / "x").read_text() == "x"
    (first.target / "y").write_text("y")
    for each in (first, second):
        edited(each, readOnly=True).publish()
    (first.target / "z").write_text("z")
    with pytest.raises(OSError, match="Read-only"):
        (second.target / "z").unlink()


class Told(Cluster):
    """A cluster whose Datastore has this status.mount; None: the API server is away."""

    def __init__(self, settings: dict[str, Any] | None) -> None:
        self.settings = settings

    def seen(self, handle: VolumeHandle) -> Seen:
        if self.settings is None:
            raise Unreachable("no answer")
        return Seen(settings=self.settings, usage=(5_000_000, 3))


@promise("S-231")
def test_the_status_of_a_datastore_says_how_it_is_mounted_also_when_nobody_can_be_asked(
    driver: Driver, pod: Pods
) -> None:
    first = pod()
    spec = json.loads(first.context["datastore.dev/spec"])
    request = csi.NodePublishVolumeRequest(
        volume_id=first.volume_id,
        staging_target_path=first.staging,
        target_path=str(first.target),
        volume_capability=first.capability(),
        secrets=first.secrets,
        volume_context=first.context,
    )
    wanted = parse.publish(request)

    def shown() -> tuple[int, int]:
        found = os.statvfs(first.target)
        return found.f_blocks * found.f_frsize, (found.f_blocks - found.f_bfree) * found.f_frsize

    told = Told({"spec": {**spec, "capacity": "3Gi"}})
    settings = replace(driver.settings, policy=EndpointPolicy(allow_ranges=("127.0.0.0/8",)))
    volumes = Volumes(settings, told)
    volumes.stage(wanted)
    volumes.publish(wanted)
    assert shown() == (3 << 30, 5_001_216), "one answer serves settings and use"
    first.publish()  # as a plugin that knows no cluster: what is on the disk counts
    assert shown()[0] == 3 << 30

    told.settings = {"spec": {**spec, "capacity": "4Gi"}}
    later = Volumes(settings, told)
    later.fuse.adopt()
    assert later.refresh(first.volume_id)
    assert shown()[0] == 4 << 30

    later.unpublish(first.volume_id, str(first.target))
    later.unstage(first.volume_id, first.staging)
    away = Volumes(settings, Told(None))
    away.stage(wanted)
    away.publish(wanted)
    assert shown()[0] == 4 << 30
    for each in (volumes, later, away):
        each.fuse.handles.clear()
