"""What the node plugin asks of the API server: Datastores that inline volumes name, and how full they are."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from datastore.api.volumecontext import EPHEMERAL, SPEC, VolumeHandle
from datastore.csi.errors import KeeperAway, Refused, VolumeBusy
from datastore.csi.kubeapi import KubeApi, Named
from datastore.csi.request import POD_NAMESPACE, Access, Wanted
from datastore.csi.settings import Settings
from datastore.csi.usage import AGAIN_S, NOT_YET_S, Usage
from datastore.csi.volumes import Volumes
from datastore.errors import DatastoreError, InvalidManifest, NotFound, Unreachable

ATTRIBUTES = {SPEC: '{"s3": {"bucket": "b-1", "endpoint": "http://127.0.0.1:9"}}'}
DATASTORE = "/apis/datastore.dev/v1alpha1/namespaces/team/datastores/data"
VOLUME = "/api/v1/persistentvolumes/datastore-0001"


def wanted(tmp_path: Path, **secrets: str) -> Wanted:
    context = {"datastore": "data", EPHEMERAL: "true", POD_NAMESPACE: "team"}
    target = str(tmp_path / "target")
    return Wanted(volume_id="csi-1", context=context, secrets=secrets, access=Access(), target_path=target)


def volumes(tmp_path: Path, found: Named | DatastoreError) -> Volumes:
    def lookup(namespace: str, name: str) -> Named:
        assert (namespace, name) == ("team", "data")
        if isinstance(found, DatastoreError):
            raise found
        return found

    return Volumes(Settings(node_id="n", plugin_dir=tmp_path / "plugin"), lookup)


@pytest.mark.parametrize(
    ("secret", "said"),
    [
        ("keys", r"needs nodePublishSecretRef: \{name: keys\}; or use persistentVolumeClaim: \{claimName: data\}"),
        ("", r"has no Secret in this namespace that an inline volume could name; use persistentVolumeClaim"),
    ],
)
def test_an_inline_volume_by_name_without_keys_is_told_what_to_do(tmp_path: Path, secret: str, said: str) -> None:
    """S-120"""
    made = volumes(tmp_path, Named(attributes=ATTRIBUTES, secret=secret))
    with pytest.raises(InvalidManifest, match=said) as refused:
        made.publish(wanted(tmp_path))
    assert "\n" not in str(refused.value)


def test_with_keys_it_is_mounted_as_the_datastore_is(tmp_path: Path) -> None:
    """S-120: so far that the keeper is asked, which is not there."""
    made = volumes(tmp_path, Named(attributes=ATTRIBUTES, secret="keys"))
    with pytest.raises(KeeperAway):
        made.publish(wanted(tmp_path, AWS_ACCESS_KEY_ID="a", AWS_SECRET_ACCESS_KEY="b"))
    with pytest.raises(Unreachable):
        volumes(tmp_path, Unreachable("no answer")).publish(wanted(tmp_path))


def test_one_that_is_being_deleted_is_mounted_for_no_other_pod(tmp_path: Path) -> None:
    """S-132: a pod that has it is looked at again as before."""
    keys = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
    made = volumes(tmp_path, Named(attributes=ATTRIBUTES, secret="keys", ending=True))
    with pytest.raises(Refused, match="Datastore data is being deleted"):
        made.publish(wanted(tmp_path, **keys))
    made.holdings.get = lambda _volume_id: object()  # type: ignore[method-assign, assignment, return-value]
    with pytest.raises(KeeperAway):
        made.publish(wanted(tmp_path, **keys))


@pytest.mark.parametrize(
    ("endpoint", "patterns", "said"),
    [
        ("http://169.254.169.254", (), "does not allow the endpoint http://169.254.169.254"),
        ("http://10.0.0.1:2379", ("https://*.example.org",), "does not allow the endpoint http://10.0.0.1:2379"),
        ("", ("https://*.example.org",), "does not allow the endpoint https://s3.amazonaws.com"),
    ],
)
@pytest.mark.parametrize("whole", [True, False])
def test_an_inline_volume_leads_a_node_nowhere_but_where_the_administrator_says(
    tmp_path: Path, endpoint: str, patterns: tuple[str, ...], said: str, whole: bool
) -> None:
    """S-133"""
    where = {"bucket": "b-1", **({"endpoint": endpoint} if endpoint else {})}
    given = {SPEC: json.dumps({"s3": where})} if whole else where
    inline = replace(wanted(tmp_path, AWS_ACCESS_KEY_ID="a"), context={**given, EPHEMERAL: "true"})
    made = Volumes(Settings(node_id="n", plugin_dir=tmp_path / "plugin", endpoints=patterns))
    with pytest.raises(Refused, match=said):
        made.publish(inline)


def test_what_is_allowed_or_the_administrators_own_is_mounted(tmp_path: Path) -> None:
    """S-133: so far that the keeper is asked. Volumes that are not inline, and Datastores, are of the controller."""
    keys = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
    given = {"bucket": "b-1", "endpoint": "https://s3.example.org", EPHEMERAL: "true"}
    only = Settings(node_id="n", plugin_dir=tmp_path / "plugin", endpoints=("https://*.example.org",))
    made = Volumes(only, lambda _namespace, _name: Named(attributes=ATTRIBUTES, secret="keys"))
    staged = replace(wanted(tmp_path, **keys), context=ATTRIBUTES, staging_path=str(tmp_path / "staging"))
    for each in (replace(wanted(tmp_path, **keys), context=given), wanted(tmp_path, **keys), staged):
        with pytest.raises(KeeperAway):
            made.publish(each)


def api(monkeypatch: pytest.MonkeyPatch, **answers: dict[str, Any]) -> KubeApi:
    """One whose server has these objects; another one is NotFound."""

    def call(_self: KubeApi, _method: str, path: str, _patch: Any = None) -> dict[str, Any]:
        found = {DATASTORE: answers.get("datastore"), VOLUME: answers.get("volume")}.get(path)
        if found is None:
            raise NotFound(f"GET {path}: the API server says 404 Not Found")
        return found

    monkeypatch.setattr(KubeApi, "_call", call)
    return KubeApi(url="https://api")


def datastore(**more: Any) -> dict[str, Any]:
    return {"metadata": {"uid": "0001"}, "spec": {"s3": {"bucket": "b-1"}}, **more}


def volume(namespace: str = "team", driver: str = "csi.datastore.dev") -> dict[str, Any]:
    secret = {"name": "keys", "namespace": namespace}
    return {"spec": {"csi": {"driver": driver, "volumeAttributes": ATTRIBUTES, "nodePublishSecretRef": secret}}}


def test_a_datastore_is_found_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    found = api(monkeypatch, datastore=datastore(), volume=volume()).named("team", "data")
    assert found == Named(attributes=ATTRIBUTES, secret="keys")
    ending = datastore(metadata={"uid": "0001", "deletionTimestamp": "2026-01-31T12:00:00Z"})
    assert api(monkeypatch, datastore=ending, volume=volume()).named("team", "data").ending
    of_the_administrator = api(monkeypatch, datastore=datastore(), volume=volume("admin")).named("team", "data")
    assert of_the_administrator.secret == ""


@pytest.mark.parametrize(
    ("answers", "kind", "said"),
    [
        ({}, NotFound, "there is no Datastore data in namespace team"),
        ({"datastore": datastore()}, Refused, "team/data has no volume yet; kubectl describe dst says why"),
        ({"datastore": datastore(spec={"claim": {"name": "x"}})}, Refused, "another driver's volume; use its claim"),
        ({"datastore": datastore(), "volume": volume(driver="ebs")}, Refused, "no volume of csi.datastore.dev"),
    ],
)
def test_a_datastore_that_cannot_be_mounted_so_is_told_in_a_line(
    monkeypatch: pytest.MonkeyPatch, answers: dict[str, Any], kind: type[DatastoreError], said: str
) -> None:
    """S-120"""
    with pytest.raises(kind, match=said):
        api(monkeypatch, **answers).named("team", "data")


def test_how_full_a_datastore_is_stands_in_its_status(monkeypatch: pytest.MonkeyPatch) -> None:
    """S-121"""
    handle = VolumeHandle(namespace="team", name="data", uid="0001")
    assert api(monkeypatch, datastore=datastore()).usage_of(handle) is None
    counted = datastore(status={"usage": {"bytes": 5000, "objects": 3}})
    assert api(monkeypatch, datastore=counted).usage_of(handle) == (5000, 3)
    with pytest.raises(NotFound, match="another one"):
        api(monkeypatch, datastore=counted).usage_of(VolumeHandle(namespace="team", name="data", uid="0002"))


class Filled:
    """Volumes of this node that take a number."""

    def __init__(self, *ids: str) -> None:
        self.holdings = self
        self.ids = ids
        self.told: list[tuple[str, int, int]] = []
        self.busy = False

    def volumes(self) -> list[str]:
        return list(self.ids)

    def fill(self, volume_id: str, used_bytes: int, used_files: int) -> None:
        if self.busy:
            raise VolumeBusy(volume_id)
        self.told.append((volume_id, used_bytes, used_files))


def test_each_volume_is_asked_for_in_its_turn() -> None:
    """S-121"""
    asked: list[str] = []
    answers: dict[str, Any] = {"a": (1, 2), "b": None, "gone": NotFound("gone")}

    def counted(handle: VolumeHandle) -> tuple[int, int] | None:
        asked.append(handle.name)
        answer = answers[handle.name]
        if isinstance(answer, DatastoreError):
            raise answer
        return answer  # type: ignore[no-any-return]

    node = Filled("team/a/1", "csi-inline", "team/gone/2", "team/b/3")
    usage = Usage(node, counted)  # type: ignore[arg-type]
    usage.look(100.0)
    assert (asked, node.told) == (["a", "gone", "b"], [("team/a/1", 1, 2)])
    usage.look(100.0 + NOT_YET_S)
    assert asked[3:] == ["b"]
    answers["b"], node.busy = (3, 4), True
    usage.look(100.0 + NOT_YET_S * 2)
    node.busy = False
    usage.look(100.0 + NOT_YET_S * 3)
    assert node.told[1:] == [("team/b/3", 3, 4)]
    answers["a"] = Unreachable("no answer")
    del asked[:]
    usage.look(100.0 + AGAIN_S)
    usage.look(100.0 + AGAIN_S + NOT_YET_S - 1)
    assert asked == ["a"], "nobody else is asked while the API server is away"
    usage.look(100.0 + AGAIN_S + NOT_YET_S)
    assert asked[1:] == ["a"]
