"""datastore.csi.podlogs: the whole log of a pod in its Datastore, from the kubelet's files."""

from __future__ import annotations

import gzip
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from datastore.api.names import LOGS_VOLUME
from datastore.api.volumecontext import DRIVER
from datastore.csi.podlogs import PodLogs
from tests.patience import PATIENCE_S
from tests.promises import promise

UID = "11111111-2222-3333-4444-555555555555"


class Node:
    """The files that the kubelet has for one pod, made by the test."""

    def __init__(self, root: Path, wanted: str = "runs/mnist/worker") -> None:
        self.root = root
        self.plugins: list[PodLogs] = []
        self.volumes = root / "pods" / UID / "volumes"
        wish = self.volumes / "kubernetes.io~downward-api" / LOGS_VOLUME
        wish.mkdir(parents=True)
        told = {"datastore": "out", "path": wanted}
        for name, text in {"wanted": json.dumps(told), "index": "1", "pod": "p", "namespace": "team"}.items():
            (wish / name).write_text(text)
        self.wish = wish
        self.mount = self.volumes / "kubernetes.io~csi" / "pv" / "mount"
        self.mount.mkdir(parents=True)
        about = {"driverName": DRIVER, "volumeHandle": "team/out/u-1"}
        (self.mount.parent / "vol_data.json").write_text(json.dumps(about))
        self.log = root / "log" / f"team_p_{UID}" / "main" / "0.log"
        self.log.parent.mkdir(parents=True)
        self.target = self.mount / "runs" / "mnist" / "worker-1.log"
        self.followed = self.plugin()

    def plugin(self) -> PodLogs:
        """Return the PodLogs of a plugin that was just started."""
        self.plugins.append(PodLogs(self.root / "pods", self.root / "log", self.root / "notes"))
        return self.plugins[-1]

    def close(self) -> None:
        for each in self.plugins:
            each.close()

    def copied(self) -> None:
        """Copy new lines, and wait until they are written."""
        self.followed.look()
        self.followed._working[UID].result(PATIENCE_S)

    def says(self, *lines: str, tag: str = "F") -> None:
        with self.log.open("a") as file:
            file.writelines(f"2026-01-01T00:00:00.000000000Z stdout {tag} {line}\n" for line in lines)

    def ends(self) -> str:
        self.followed.finish(str(self.mount))
        return self.target.read_text()


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    monkeypatch.setattr(os.path, "ismount", lambda _: True)
    made = Node(tmp_path)
    yield made
    made.close()


@promise("S-357")
def test_the_whole_log_is_in_the_datastore_when_the_pods_volume_goes(node: Node) -> None:
    """The log is rotated meanwhile, and has lines in several parts."""
    node.says("one", "two")
    node.followed.look()
    node.says("thr", tag="P")
    node.says("ee")
    node.log.rename(node.log.with_name("0.log.20260101-000000"))
    node.says("four", "")
    assert node.ends() == "one\ntwo\nthree\nfour\n\n"
    node.says("late")
    assert node.ends() == "one\ntwo\nthree\nfour\n\n", "its containers have ended"


@promise("S-357")
def test_the_request_for_a_log_may_vanish_before_the_volume(node: Node) -> None:
    """The kubelet removes the volumes of a pod in any order, or at once."""
    node.says("one")
    node.copied()
    node.says("two")
    shutil.rmtree(node.wish)
    node.followed.look()
    assert node.ends() == "one\ntwo\n"


@promise("S-357")
def test_nothing_of_a_pod_is_remembered_when_it_is_gone(node: Node) -> None:
    node.says("one")
    assert node.ends() == "one\n"
    assert list((node.root / "notes").iterdir())
    shutil.rmtree(node.root / "pods" / UID)
    node.followed.look()
    assert not list((node.root / "notes").iterdir())


@promise("S-357")
def test_a_log_that_is_rotated_while_it_is_opened_is_written_once(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    node.says("one")
    really = os.open

    def opened(path: Path, *arguments: Any, **more: Any) -> int:
        descriptor = really(path, *arguments, **more)
        if path == node.log and not list(node.log.parent.glob("0.log.*")):
            node.log.rename(node.log.with_name("0.log.20260101-000000"))
            node.says("two")
        return descriptor

    monkeypatch.setattr(os, "open", opened)
    assert node.ends() == "one\ntwo\n"


@promise("S-357")
def test_a_new_plugin_continues_the_copy_of_a_log(node: Node) -> None:
    """The same holds behind the text that an earlier pod of the replica wrote."""
    node.target.parent.mkdir(parents=True)
    node.target.write_text("the first run\n")
    node.says("one")
    node.copied()
    node.log.rename(aside := node.log.with_name("0.log.20260101-000000"))
    with gzip.open(f"{aside}.gz", "wb") as file:
        file.write(aside.read_bytes())
    aside.unlink()
    node.says("two")
    node.followed = node.plugin()
    assert node.ends() == "the first run\none\ntwo\n"


@promise("S-357")
def test_a_log_that_is_being_compressed_is_written_once(node: Node) -> None:
    """For a moment the compressed file is beside its original, and another one is incomplete."""
    for number, text in enumerate(("old", "newer")):
        node.says(text)
        node.log.rename(aside := node.log.with_name(f"0.log.20260101-00000{number}"))
        if text == "old":
            aside.with_name(f"{aside.name}.gz").write_bytes(gzip.compress(aside.read_bytes()))
    aside.with_name(f"{aside.name}.tmp").write_bytes(b"a b c half written\n")
    node.says("now")
    assert node.ends() == "old\nnewer\nnow\n"


@promise("S-357")
@pytest.mark.parametrize("wanted", ["../../x", "a/../../x"])
def test_a_path_that_leads_out_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanted: str) -> None:
    monkeypatch.setattr(os.path, "ismount", lambda _: True)
    node = Node(tmp_path, wanted)
    node.says("one")
    node.followed.finish(str(node.mount))
    node.close()
    assert not list(tmp_path.rglob("x-1.log"))


@promise("S-357")
def test_links_of_the_datastore_are_not_followed(node: Node, tmp_path: Path) -> None:
    """Anything but a regular file is refused, too."""
    outside = tmp_path / "outside"
    outside.mkdir()
    node.says("one")
    (node.mount / "runs").symlink_to(outside)
    node.followed.finish(str(node.mount))
    assert list(outside.iterdir()) == []
    (node.mount / "runs").unlink()
    node.target.parent.mkdir(parents=True)
    node.target.symlink_to(outside / "file")
    node.plugin().finish(str(node.mount))
    node.target.unlink()
    os.mkfifo(node.target)
    node.plugin().finish(str(node.mount))
    assert list(outside.iterdir()) == []


@promise("S-357")
@pytest.mark.parametrize(
    ("name", "text"), [("namespace", "other/.."), ("pod", "p/../../x"), ("index", "1/../../x"), ("wanted", "[]")]
)
def test_a_pod_cannot_request_another_pods_log(node: Node, name: str, text: str) -> None:
    """The names in the request are checked."""
    (node.wish / name).write_text(text)
    node.says("one")
    node.followed.finish(str(node.mount))
    assert not [each for each in node.mount.rglob("*") if each.is_file()]


@promise("S-357")
def test_only_a_datastore_that_the_pod_has_mounted_is_written(node: Node) -> None:
    (node.mount.parent / "vol_data.json").write_text(json.dumps({"driverName": "other", "volumeHandle": "team/out/u"}))
    node.says("one")
    node.followed.finish(str(node.mount))
    assert list(node.mount.iterdir()) == []
