"""What the node plugin asks of the API server: Datastores that inline volumes name, and its own taint."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kubernetes.client import ApiClient, Configuration

from datastore.api.endpoints import EndpointPolicy
from datastore.api.resources import DATASTORES, NODES, VOLUMES, Resource
from datastore.api.volumecontext import EPHEMERAL, SPEC, VolumeHandle
from datastore.csi.cluster import Cluster, Named, Seen
from datastore.csi.errors import NotAnswering, Refused
from datastore.csi.request import POD_NAMESPACE, Access, Wanted
from datastore.csi.settings import Settings
from datastore.csi.volumes import Volumes
from datastore.errors import DatastoreError, InvalidManifest, NotFound, Unreachable
from datastore.kubeclient import KubeClient
from tests.playedapi import played_api
from tests.promises import promise

ATTRIBUTES = {SPEC: '{"s3": {"bucket": "b-1", "endpoint": "http://127.0.0.1:9"}}'}


def wanted(tmp_path: Path, **secrets: str) -> Wanted:
    context = {"datastore": "data", EPHEMERAL: "true", POD_NAMESPACE: "team"}
    target = str(tmp_path / "target")
    return Wanted(volume_id="csi-1", context=context, secrets=secrets, access=Access(), target_path=target)


class Lookup(Cluster):
    """A cluster with one Datastore, or whose requests fail."""

    def __init__(self, found: Named | DatastoreError) -> None:
        self.found = found

    def named(self, namespace: str, name: str) -> Named:
        assert (namespace, name) == ("team", "data")
        if isinstance(self.found, DatastoreError):
            raise self.found
        return self.found

    def seen(self, handle: VolumeHandle) -> Seen:
        return Seen()


def volumes(tmp_path: Path, found: Named | DatastoreError) -> Volumes:
    return Volumes(Settings(node_id="n", plugin_dir=tmp_path / "plugin"), Lookup(found))


@promise("S-120")
@pytest.mark.parametrize(
    ("secret", "said"),
    [
        ("keys", r"needs nodePublishSecretRef: \{name: keys\}; or use persistentVolumeClaim: \{claimName: data\}"),
        ("", r"has no Secret in this namespace that an inline volume could name; use persistentVolumeClaim"),
    ],
)
def test_an_inline_volume_by_name_without_keys_is_told_what_to_do(tmp_path: Path, secret: str, said: str) -> None:
    made = volumes(tmp_path, Named(attributes=ATTRIBUTES, secret=secret))
    with pytest.raises(InvalidManifest, match=said) as refused:
        made.publish(wanted(tmp_path))
    assert "\n" not in str(refused.value)


@promise("S-120")
def test_with_keys_it_is_mounted_as_the_datastore_is(tmp_path: Path) -> None:
    """The request reaches the mount daemon, which does not run here."""
    made = volumes(tmp_path, Named(attributes=ATTRIBUTES, secret="keys"))
    with pytest.raises(NotAnswering):
        made.publish(wanted(tmp_path, AWS_ACCESS_KEY_ID="a", AWS_SECRET_ACCESS_KEY="b"))
    with pytest.raises(Unreachable):
        volumes(tmp_path, Unreachable("no answer")).publish(wanted(tmp_path))


@promise("S-132")
def test_a_datastore_that_is_being_deleted_is_mounted_for_no_new_pod(tmp_path: Path) -> None:
    """The volume of a pod that has it mounted is still refreshed."""
    keys = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
    made = volumes(tmp_path, Named(attributes=ATTRIBUTES, secret="keys", ending=True))
    with pytest.raises(Refused, match="Datastore data is being deleted"):
        made.publish(wanted(tmp_path, **keys))
    made.fuse.get = lambda _volume_id: object()  # type: ignore[method-assign, assignment, return-value]
    with pytest.raises(NotAnswering):
        made.publish(wanted(tmp_path, **keys))


@promise("S-133")
@pytest.mark.parametrize(
    ("endpoint", "patterns", "said"),
    [
        ("http://10.0.0.1:2379", ("https://*.example.org",), "does not allow http://10.0.0.1:2379"),
        ("", ("https://*.example.org",), "does not allow https://s3.amazonaws.com"),
    ],
)
@pytest.mark.parametrize("whole", [True, False])
def test_an_inline_volume_uses_only_endpoints_that_the_administrator_allows(
    tmp_path: Path, endpoint: str, patterns: tuple[str, ...], said: str, whole: bool
) -> None:
    where = {"bucket": "b-1", **({"endpoint": endpoint} if endpoint else {})}
    given = {SPEC: json.dumps({"s3": where})} if whole else where
    inline = replace(wanted(tmp_path, AWS_ACCESS_KEY_ID="a"), context={**given, EPHEMERAL: "true"})
    made = Volumes(Settings(node_id="n", plugin_dir=tmp_path / "plugin", policy=EndpointPolicy(endpoints=patterns)))
    with pytest.raises(Refused, match=said):
        made.publish(inline)


@promise("S-133", "S-203")
@pytest.mark.parametrize(
    "spec",
    [
        {"nfs": {"server": "10.0.0.1", "path": "/"}},
        {"sftp": {"host": "127.0.0.1", "path": "/", "credentialsSecret": "keys"}},
        {"glusterfs": {"servers": ["169.254.169.254"], "volume": "v"}},
    ],
)
def test_an_inline_volume_with_fields_of_its_own_must_be_a_bucket(tmp_path: Path, spec: dict[str, Any]) -> None:
    """Other servers need a Datastore, to which the cluster's rules apply."""
    made = Volumes(Settings(node_id="n", plugin_dir=tmp_path / "plugin", policy=EndpointPolicy(allow_ranges=("::/0",))))
    inline = replace(wanted(tmp_path, username="u"), context={SPEC: json.dumps(spec), EPHEMERAL: "true"})
    with pytest.raises(InvalidManifest, match="an inline volume is a bucket's"):
        made.publish(inline)


@promise("S-133")
def test_an_allowed_endpoint_or_the_administrators_own_is_mounted(tmp_path: Path) -> None:
    """The request reaches the mount daemon. The controller has checked Datastores and volumes that are not inline."""
    keys = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
    given = {"bucket": "b-1", "endpoint": "https://s3.example.org", EPHEMERAL: "true"}
    only = Settings(
        node_id="n", plugin_dir=tmp_path / "plugin", policy=EndpointPolicy(endpoints=("https://*.example.org",))
    )
    made = Volumes(only, Lookup(Named(attributes=ATTRIBUTES, secret="keys")))
    staged = replace(wanted(tmp_path, **keys), context=ATTRIBUTES, staging_path=str(tmp_path / "staging"))
    for each in (replace(wanted(tmp_path, **keys), context=given), wanted(tmp_path, **keys), staged):
        with pytest.raises(NotAnswering):
            made.publish(each)


class Objects:
    """A client of an API server with these objects."""

    def __init__(self, *answers: tuple[Resource, Any]) -> None:
        self.answers = dict(answers)

    def get(self, resource: Resource, name: str, *, namespace: str | None = None) -> Any:
        assert (resource, namespace, name) in {(DATASTORES, "team", "data"), (VOLUMES, None, "datastore-0001")}
        return self.answers.get(resource)


def cluster(*answers: tuple[Resource, Any]) -> Cluster:
    return Cluster(Objects(*answers))  # type: ignore[arg-type]


def datastore(**more: Any) -> dict[str, Any]:
    return {"metadata": {"uid": "0001"}, "spec": {"s3": {"bucket": "b-1"}}, **more}


def volume(namespace: str = "team", driver: str = "csi.datastore.dev") -> dict[str, Any]:
    secret = {"name": "keys", "namespace": namespace}
    return {"spec": {"csi": {"driver": driver, "volumeAttributes": ATTRIBUTES, "nodePublishSecretRef": secret}}}


def test_a_datastore_is_found_by_its_name() -> None:
    found = cluster((DATASTORES, datastore()), (VOLUMES, volume())).named("team", "data")
    assert found == Named(attributes=ATTRIBUTES, secret="keys")
    ending = datastore(metadata={"uid": "0001", "deletionTimestamp": "2026-01-31T12:00:00Z"})
    assert cluster((DATASTORES, ending), (VOLUMES, volume())).named("team", "data").ending
    of_the_administrator = cluster((DATASTORES, datastore()), (VOLUMES, volume("admin"))).named("team", "data")
    assert of_the_administrator.secret == ""


@promise("S-120")
@pytest.mark.parametrize(
    ("answers", "kind", "said"),
    [
        ([], NotFound, "there is no Datastore data in namespace team"),
        ([(DATASTORES, datastore())], Refused, "team/data has no volume yet; kubectl describe dst says why"),
        ([(DATASTORES, datastore(spec={"claim": {"name": "x"}}))], Refused, "another driver's volume; use its claim"),
        ([(DATASTORES, datastore()), (VOLUMES, volume(driver="ebs"))], Refused, "no volume of csi.datastore.dev"),
    ],
)
def test_a_datastore_that_cannot_be_an_inline_volume_is_refused_in_one_line(
    answers: list[tuple[Resource, Any]], kind: type[DatastoreError], said: str
) -> None:
    with pytest.raises(kind, match=said):
        cluster(*answers).named("team", "data")


@promise("S-121", "S-231")
def test_the_status_has_the_settings_that_a_mount_needs() -> None:
    handle = VolumeHandle(namespace="team", name="data", uid="0001")
    assert cluster((DATASTORES, datastore())).seen(handle) == Seen()
    settings = {"spec": {"s3": {"bucket": "b-1"}, "metadataTTL": "5s"}}
    whole = datastore(status={"usage": {"bytes": 5000, "objects": 3}, "mount": settings})
    assert cluster((DATASTORES, whole)).seen(handle) == Seen(settings=settings, usage=(5000, 3))
    with pytest.raises(NotFound, match="another one"):
        cluster((DATASTORES, whole)).seen(VolumeHandle(namespace="team", name="data", uid="0002"))
    named = cluster((DATASTORES, whole), (VOLUMES, volume())).named("team", "data")
    assert json.loads(named.attributes[SPEC])["metadataTTL"] == "5s"
    assert json.loads(named.attributes[SPEC])["s3"]["endpoint"] == "http://127.0.0.1:9"


@promise("S-119")
def test_only_our_taint_is_removed_and_no_other_change_is_lost() -> None:
    with played_api() as api:
        client = KubeClient(ApiClient(Configuration(host=api.url)))
        node = Cluster(client)
        with pytest.raises(NotFound, match="there is no node n"):
            node.remove_taint("n", "ours")
        taints = [{"key": "other"}, {"key": "ours"}]
        api.objects[NODES.path("", "n")] = {"metadata": {"resourceVersion": "7"}, "spec": {"taints": taints}}
        assert node.remove_taint("n", "ours")
        assert api.asked[-1][2] == {"metadata": {"resourceVersion": "7"}, "spec": {"taints": [{"key": "other"}]}}
        assert not node.remove_taint("n", "ours")
        assert node.remove_taint("n", "other")
        assert "taints" not in api.objects[NODES.path("", "n")]["spec"]
