"""What a node knows of its volumes' Datastores: asked for now and then, and remembered without the API server."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from datastore.api.volumecontext import MEMORY, SPEC, VolumeHandle
from datastore.csi import datastores
from datastore.csi.cluster import Cluster, Seen
from datastore.csi.datastores import AGAIN_S, FRESH_S, NOT_YET_S, Datastores, Refresher
from datastore.csi.errors import NotAnswering, VolumeBusy
from datastore.errors import AccessDenied, DatastoreError, NotFound, Unreachable
from tests.promises import promise

VOLUME = "team/data/1"
BASE = {SPEC: '{"s3": {"bucket": "b-1", "endpoint": "http://h:1"}}', "csi.storage.k8s.io/pod.name": "p"}


class Told(Cluster):
    """A cluster in which every Datastore has this status."""

    def __init__(self, answer: Seen | DatastoreError) -> None:
        self.answer = answer
        self.asked = 0

    def seen(self, handle: VolumeHandle) -> Seen:
        assert str(handle) == VOLUME
        self.asked += 1
        if isinstance(self.answer, DatastoreError):
            raise self.answer
        return self.answer


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def settings(memory: str = "", **more: Any) -> Mapping[str, Any]:
    """Return the volume's status.mount with edits."""
    spec = {"s3": {"bucket": "b-1", "endpoint": "http://h:1"}, **more}
    return {"spec": spec, **({"memory": memory} if memory else {})}


def spec_of(context: Mapping[str, str]) -> Any:
    return json.loads(context[SPEC])


@promise("S-231")
def test_settings_come_from_the_datastore_and_the_location_from_the_volume(tmp_path: Path) -> None:
    moved = {"s3": {"bucket": "another", "prefix": "x/", "region": "r"}, "readOnly": True, "metadataTTL": "9s"}
    told = Told(Seen(settings={"spec": moved, "memory": "1Gi"}, usage=(5, 1)))
    current = Datastores(told, tmp_path).current(VOLUME, {**BASE, MEMORY: "2Gi"})
    assert spec_of(current.context) == {
        "s3": {"bucket": "b-1", "endpoint": "http://h:1", "region": "r"},
        "readOnly": True,
        "metadataTTL": "9s",
    }
    assert (current.context[MEMORY], current.usage) == ("1Gi", (5, 1))
    assert current.context["csi.storage.k8s.io/pod.name"] == "p"
    told.answer = Seen(settings=settings())
    assert MEMORY not in Datastores(told, tmp_path).current(VOLUME, {**BASE, MEMORY: "2Gi"}).context


@promise("S-231")
@pytest.mark.parametrize(
    "wrong", [{"spec": {"nfs": {"server": "h", "path": "/"}}}, {"spec": "s3"}, {"spec": {"s3": []}}, {"other": 1}]
)
def test_settings_that_are_not_understood_are_ignored(tmp_path: Path, wrong: Any) -> None:
    """A later release may write such settings."""
    current = Datastores(Told(Seen(settings=wrong, usage=(1, 1))), tmp_path).current(VOLUME, BASE)
    assert (current.context, current.usage) == (BASE, (1, 1))


@promise("S-231")
def test_the_newest_settings_are_kept_for_when_the_api_server_is_away(tmp_path: Path) -> None:
    """The next process uses them, too."""
    told = Told(Seen(settings=settings(metadataTTL="9s")))
    Datastores(told, tmp_path).current(VOLUME, BASE)
    told.answer = Unreachable("no answer")
    again = Datastores(told, tmp_path)
    assert spec_of(again.current(VOLUME, BASE).context)["metadataTTL"] == "9s"
    assert spec_of(Datastores(None, tmp_path).current(VOLUME, BASE).context)["metadataTTL"] == "9s"
    renewed = again.again(VOLUME)
    assert renewed is not None
    assert spec_of(renewed.context)["metadataTTL"] == "9s"
    anew = {SPEC: '{"s3": {"bucket": "b-1", "endpoint": "http://h:1"}, "metadataTTL": "20s"}'}
    assert spec_of(again.current(VOLUME, anew).context)["metadataTTL"] == "20s", "the volume was made anew since"


@promise("S-231")
def test_the_settings_of_a_volume_in_use_stay_however_many_others_come_and_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each use counts, even of settings that have not changed."""
    monkeypatch.setattr(datastores, "REMEMBERED", 1)
    known = Datastores(Told(Seen(settings=settings(metadataTTL="9s"))), tmp_path)
    known.current(VOLUME, BASE)
    other = "team/other/1"
    Datastores(None, tmp_path).current(other, BASE)
    for written in tmp_path.iterdir():
        os.utime(written, (2, 2) if other in written.read_text() else (1, 1))
    known.current(VOLUME, BASE)
    known.forget(other)
    assert Datastores(None, tmp_path).again(other) is None
    renewed = Datastores(None, tmp_path).again(VOLUME)
    assert renewed is not None
    assert spec_of(renewed.context)["metadataTTL"] == "9s"


@promise("S-76")
def test_no_secret_is_kept(tmp_path: Path) -> None:
    Datastores(Told(Seen(settings=settings())), tmp_path / "d").current(VOLUME, {**BASE, "other": "CANARY"})
    (path,) = (tmp_path / "d").iterdir()
    assert "CANARY" not in path.read_text()
    assert (tmp_path / "d").stat().st_mode & 0o777 == 0o700


@promise("S-231")
@pytest.mark.parametrize("error", [NotFound("gone"), AccessDenied("no right"), Unreachable("away")])
def test_a_datastore_that_cannot_be_asked_for_is_mounted_as_its_volume_says(
    tmp_path: Path, error: DatastoreError
) -> None:
    assert Datastores(Told(error), tmp_path).current(VOLUME, BASE).context == BASE


def test_no_request_is_made_for_volumes_of_other_provisioners(tmp_path: Path) -> None:
    told = Told(Seen(settings=settings()))
    known = Datastores(told, tmp_path / "none")
    assert known.current("csi-inline", BASE).context == BASE
    assert known.again("csi-inline") is None
    assert (told.asked, (tmp_path / "none").exists()) == (0, False)


@promise("S-231")
def test_the_api_server_is_asked_seldom_and_left_alone_while_it_is_away(tmp_path: Path) -> None:
    told, clock = Told(Seen(settings=settings())), Clock()
    known = Datastores(told, tmp_path, clock)
    for _ in range(3):
        known.current(VOLUME, BASE)
    assert told.asked == 1
    known.current(VOLUME, BASE, fresh=True)
    assert told.asked == 2, "a volume that is staged is asked for whenever that was last"
    clock.now += FRESH_S
    known.current(VOLUME, BASE)
    assert told.asked == 3
    told.answer = Unreachable("no answer")
    clock.now += FRESH_S
    for _ in range(3):
        known.current(VOLUME, BASE, fresh=True)
    assert told.asked == 4
    clock.now += NOT_YET_S
    known.current(VOLUME, BASE)
    assert told.asked == 5


def test_a_full_disk_keeps_no_volume_from_being_mounted(tmp_path: Path) -> None:
    place = tmp_path / "file"
    place.write_text("in the way")
    told = Told(Seen(settings=settings(metadataTTL="9s")))
    assert spec_of(Datastores(told, place).current(VOLUME, BASE).context)["metadataTTL"] == "9s"


@promise("S-121", "S-231")
def test_each_mounted_volume_is_refreshed_in_turn() -> None:
    mounted, asked = ["a", "b", "busy", "gone"], []
    answers: dict[str, Any] = {"a": True, "b": False, "busy": VolumeBusy("x"), "gone": NotFound("x")}

    def refresh(volume_id: str) -> bool:
        asked.append(volume_id)
        answer = answers[volume_id]
        if isinstance(answer, DatastoreError):
            raise answer
        return bool(answer)

    turns = Refresher(lambda: mounted, refresh)
    turns.look(100.0)
    assert asked == mounted
    turns.look(100.0 + NOT_YET_S)
    assert asked[4:] == ["b", "busy"], "those of which nothing is known yet"
    del asked[:]
    answers["a"] = NotAnswering("no mount daemon")
    turns.look(100.0 + AGAIN_S)
    turns.look(100.0 + AGAIN_S + NOT_YET_S - 1)
    assert asked == ["a"], "nobody else is asked while the mount daemon is away"
    answers["a"] = True
    turns.look(100.0 + AGAIN_S + NOT_YET_S)
    assert asked[1:] == ["a", "b", "busy", "gone"]
