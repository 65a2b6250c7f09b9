"""datastore.controller.datastores.effective: StorageClasses, and what a Datastore may name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from datastore.api.endpoints import AWS, EndpointPolicy
from datastore.api.names import DEFAULT_NFS_CLASS
from datastore.api.source import NFSLocation
from datastore.api.volumecontext import MEMORY, SOURCE
from datastore.backends.registry import KINDS
from datastore.controller.datastores import desired
from datastore.controller.datastores.desired import volume
from datastore.controller.datastores.effective import COMMON, SecretRef, class_name_of, effective_spec
from datastore.controller.datastores.settings import Settings
from datastore.controller.runtime.mistakes import Mistake
from tests.promises import promise


def body(spec: dict[str, Any]) -> dict[str, Any]:
    metadata = {"name": "digits", "namespace": "team", "uid": "0b6d"}
    return {"apiVersion": "datastore.dev/v1alpha1", "kind": "Datastore", "metadata": metadata, "spec": spec}


def storage_class(provisioner: str = "csi.datastore.dev", **parameters: str) -> dict[str, Any]:
    return {"metadata": {"name": "c"}, "provisioner": provisioner, "parameters": parameters}


def refused(spec: dict[str, Any], with_class: dict[str, Any] | None = None, settings: Settings | None = None) -> str:
    with pytest.raises(Mistake) as caught:
        effective_spec(body(spec), with_class, settings or Settings())
    assert caught.value.permanent
    return f"{caught.value.reason}: {caught.value}"


OF_CLASS = {"storageClassName": "c"}


def test_a_storageclass_supplies_all_settings() -> None:
    secret = {"secretName": "keys", "secretNamespace": "admin"}
    parameters = {
        "bucket": "b-${pvc.namespace}",
        "endpoint": "https://h",
        "create": "true",
        "cacheSize": "1Gi",
        **secret,
    }
    found = effective_spec(body({**OF_CLASS, "capacity": "3Gi"}), storage_class(**parameters), Settings())
    assert found.spec.s3 is not None
    assert (found.spec.s3.bucket, found.spec.s3.prefix, found.spec.s3.create) == ("b-team", "team/digits/", True)
    assert (found.spec.capacity, found.spec.cache.size) == (3 << 30, 1 << 30)
    assert (found.secret, found.class_name) == (SecretRef(namespace="admin", name="keys"), "c")


def test_the_names_of_other_drivers_parameters_work_too() -> None:
    standard = "csi.storage.k8s.io/node-publish-secret-"
    parameters = {"bucket": "shared", f"{standard}name": "keys", f"{standard}namespace": "admin"}
    assert effective_spec(body(OF_CLASS), storage_class(**parameters), Settings()).secret == SecretRef(
        namespace="admin", name="keys"
    )


SHARED = {"bucket": "shared", "secretName": "k", "secretNamespace": "n"}


@promise("S-420")
def test_a_class_can_leave_the_keys_in_each_namespace() -> None:
    chosen = storage_class(**SHARED | {"secretNamespace": "${pvc.namespace}"})
    found = effective_spec(body(OF_CLASS), chosen, Settings())
    assert found.secret == SecretRef(namespace="team", name="k")
    assert found.spec.s3 is not None
    assert (found.spec.s3.bucket, found.spec.s3.prefix) == ("shared", "team/digits/")


@pytest.mark.parametrize(
    ("parameters", "complaint"),
    [
        ({}, "bucket is missing"),
        ({**SHARED, "buckets": "x"}, "buckets is not known"),
        ({**SHARED, "create": "yes"}, "create must be 'true' or 'false'"),
        ({**SHARED, "prefix": "${user}/"}, "is not known; there are"),
        ({"bucket": "shared", "secretName": "k"}, "go together"),
        ({**SHARED, "secretNamespace": "${pvc.name}"}, "is not known; there are pvc.namespace"),
        ({**SHARED, "endpoint": "ftp://h"}, "spec.s3.endpoint must be a URL"),
        ({**SHARED, "prefix": "${pvc.namespace}-${pvc.name}/"}, "no two claims share a place"),
        ({**SHARED, "prefix": "${pvc.name}.${pvc.namespace}/"}, "no two claims share a place"),
    ],
)
def test_a_wrong_class_is_refused_by_its_parameter(parameters: dict[str, str], complaint: str) -> None:
    text = refused(OF_CLASS, storage_class(**parameters))
    assert text.startswith("StorageClassInvalid: StorageClass c: parameters: ")
    assert complaint in text


@promise("S-78")
def test_a_classes_mount_options_are_those_of_its_volumes() -> None:
    classed = {**storage_class(**SHARED), "mountOptions": ["uid=1000", "umask=027"]}
    found = effective_spec(body(OF_CLASS), classed, Settings())
    volume = desired.volume(found, "")
    assert volume is not None
    assert volume["spec"]["mountOptions"] == ["uid=1000", "umask=027"]
    plain = desired.volume(effective_spec(body(OF_CLASS), storage_class(**SHARED), Settings()), "")
    assert plain is not None
    assert not desired.volume_holds(volume, plain)
    assert desired.volume_holds(volume, volume)


def test_a_class_of_another_provisioner_is_reported() -> None:
    assert refused(OF_CLASS).startswith("StorageClassNotFound")
    assert refused(OF_CLASS, storage_class("ebs.csi.aws.com")).startswith("StorageClassNotOurs")


def test_a_user_with_a_class_names_no_bucket() -> None:
    """So nobody reaches with the administrator's keys what the class did not choose."""
    text = refused({**OF_CLASS, "s3": {"bucket": "other"}}, storage_class(**SHARED))
    assert "must have exactly one of" in text


def test_a_user_without_a_class_names_a_secret_of_the_own_namespace() -> None:
    found = effective_spec(body({"s3": {"bucket": "digits", "credentialsSecret": "keys"}}), None, Settings())
    assert found.secret == SecretRef(namespace="team", name="keys")
    assert refused({"s3": {"bucket": "digits"}}).startswith("CredentialsMissing")
    lent = effective_spec(body({"s3": {"bucket": "digits"}}), None, Settings(ambient_credentials=True))
    assert lent.secret is None


def test_what_is_not_for_clusters_is_refused() -> None:
    s3 = {"bucket": "digits", "credentialsSecret": "keys"}
    assert "for laptops" in refused({"s3": s3, "cache": {"dir": "/etc"}})
    assert refused({"sftp": {"host": "h", "path": "/a", "credentialsSecret": "keys"}}).startswith("BackendNotSupported")
    assert refused({"s3": {"bucket": "NO"}}).startswith("InvalidSpec: spec.s3.bucket")


@promise("S-118")
def test_a_class_chooses_the_memory_of_its_mounts() -> None:
    found = effective_spec(body(OF_CLASS), storage_class(**SHARED, memory="256Mi"), Settings())
    made = volume(found, "")
    assert made is not None
    assert made["spec"]["csi"]["volumeAttributes"][MEMORY] == "256Mi"
    assert "memory must be at least 192Mi" in refused(OF_CLASS, storage_class(**SHARED, memory="1Mi"))
    other = volume(effective_spec(body(OF_CLASS), storage_class(**SHARED), Settings()), "")
    assert other is not None
    assert MEMORY not in other["spec"]["csi"]["volumeAttributes"]


def nfs_class(**more: str) -> dict[str, Any]:
    parameters = {
        "backend": "nfs",
        "provisioner": "ssh",
        "host": "nas",
        "root": "/srv/datastores",
        "knownHosts": f"nas {PUBLIC_KEY}",
        "secretName": "nas",
        "secretNamespace": "storage",
        **more,
    }
    made = {**storage_class(), "parameters": {name: text for name, text in parameters.items() if text}}
    annotations = {DEFAULT_NFS_CLASS: "true"}
    metadata = {"name": "nas", "uid": "c-1", "annotations": annotations, "creationTimestamp": "2026-01-01T00:00:00Z"}
    return {**made, "metadata": metadata}


PUBLIC_KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJ9Sfy1AYqU3zTzV0n2yOaY1iGZ0mTPrXHWVlM6n9N5Z"
OWN: dict[str, Any] = {"nfs": {}}
HOST, BUCKET = "NFS host nas, root /srv/datastores", f"s3://shared/team/digits/ on {AWS}"
GANESHA = {"backend": "nfs", "provisioner": "ganesha", "namespace": "exports", "claimStorageClass": "ssd"}


@promise("S-280")
def test_an_export_of_its_own_is_of_the_default_class() -> None:
    assert class_name_of(body(OWN), [storage_class()]) is None
    assert "is-default-nfs-class=true" in refused(OWN)
    older, newer = nfs_class(), nfs_class()
    newer["metadata"] = {**newer["metadata"], "name": "fast", "creationTimestamp": "2026-02-01T00:00:00Z"}
    assert class_name_of(body(OWN), [older, newer]) == "fast"
    chosen = {**body(OWN), "status": {"storageClassName": "nas"}}
    assert class_name_of(chosen, [older, newer]) == "nas", "its data is there"
    assert class_name_of(body({"nfs": {"server": "h", "path": "/a"}}), [older]) is None
    assert class_name_of({**body({"storageClassName": "nas"}), **chosen["status"]}, [newer]) == "nas"
    found = effective_spec(body(OWN), older, Settings())
    named = effective_spec(body({"storageClassName": "nas"}), older, Settings())
    assert (found.class_name, found.class_uid, found.by_default) == ("nas", "c-1", True)
    assert (named.class_name, named.kind, named.by_default) == ("nas", found.kind, False)
    assert found.secret == SecretRef(namespace="storage", name="nas")


@promise("S-287", "S-78")
@pytest.mark.parametrize(
    ("first", "changed", "was", "named"),
    [
        (nfs_class(), nfs_class(host="nas2"), HOST, "NFS host nas2, root /srv/datastores"),
        (nfs_class(), nfs_class(root="/srv/new"), HOST, "NFS host nas, root /srv/new"),
        (nfs_class(), {**storage_class(), "parameters": GANESHA}, HOST, "NFS servers in namespace exports"),
        (nfs_class(), storage_class(**SHARED), HOST, BUCKET),
        (storage_class(**SHARED), storage_class(**SHARED | {"bucket": "new"}), BUCKET, BUCKET.replace("shared", "new")),
        (storage_class(**SHARED), storage_class(**SHARED, prefix="${pvc.uid}/"), BUCKET, f"s3://shared/0b6d/ on {AWS}"),
        (
            storage_class(**SHARED),
            storage_class(**SHARED, endpoint="https://h"),
            BUCKET,
            BUCKET.replace(AWS, "https://h"),
        ),
        (storage_class(**SHARED), nfs_class(), BUCKET, HOST),
    ],
)
def test_a_class_that_names_another_place_than_that_of_the_data_is_refused(
    first: dict[str, Any], changed: dict[str, Any], was: str, named: str
) -> None:
    """The data would stay at the old one for good, and be sought at the new one."""
    provisioned_by = effective_spec(body(OF_CLASS), first, Settings()).provisioned_by
    made = {**body(OF_CLASS), "status": {"provisionedBy": provisioned_by}}
    with pytest.raises(Mistake) as found:
        effective_spec(made, changed, Settings())
    assert found.value.reason == "StorageClassChanged"
    name = changed["metadata"]["name"]
    again = "make the class again as it was"
    assert str(found.value) == f"the data is at {was}, and StorageClass {name} now names {named}: {again}"


@promise("S-287", "S-78")
def test_a_class_may_be_made_again_with_other_keys_and_ways_to_the_same_place() -> None:
    for first, again in (
        (nfs_class(), nfs_class(host="10.0.0.9", server="nas", port="2222")),
        (storage_class(**SHARED), storage_class(**SHARED | {"secretName": "new"}, region="eu-central-1")),
    ):
        provisioned_by = effective_spec(body(OF_CLASS), first, Settings()).provisioned_by
        made = {**body(OF_CLASS), "status": {"provisionedBy": provisioned_by}}
        assert effective_spec(made, again, Settings()).provisioned_by == provisioned_by


@promise("S-280")
def test_a_default_class_without_nfs_parameters_is_reported() -> None:
    other = storage_class(**SHARED)
    other["metadata"]["annotations"] = {DEFAULT_NFS_CLASS: "true"}
    assert "is the default for NFS, and its backend is s3" in refused(OWN, other)
    gone = {**body(OWN), "status": {"storageClassName": "gone"}}
    with pytest.raises(Mistake, match="no StorageClass gone"):
        effective_spec(gone, None, Settings())


@promise("S-47")
@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("conflict", "fail", "spec.conflict: fail"),
        ("writeBack", {}, "spec.writeBack"),
        ("uploadLimit", "1Mi", "spec.uploadLimit"),
    ],
)
def test_a_class_without_a_bucket_takes_nothing_that_is_for_buckets(field: str, value: object, named: str) -> None:
    """Else the Datastore would get Ready, and each of its pods wait for a mount that its node refuses."""
    chosen = {"storageClassName": "nas", field: value}
    assert refused(chosen, nfs_class()) == (
        f"InvalidSpec: {named} is for s3 only, and the backend of StorageClass nas is nfs; leave it out, or choose "
        "another class"
    )
    assert effective_spec(body({**OF_CLASS, field: value}), storage_class(**SHARED), Settings()).spec.only_for_s3


@promise("S-288")
def test_the_key_of_an_nfs_host_stays_with_the_controller() -> None:
    found = effective_spec(body(OWN), nfs_class(), Settings())
    made = volume(found, "", NFSLocation(server="nas", path="/srv/datastores/a/data"))
    assert made is not None
    attributes = made["spec"]["csi"]["volumeAttributes"]
    assert "storage" not in str(made["spec"]["csi"]).replace("storageClass", "")
    assert json.loads(attributes[SOURCE]) == {"kind": "nfs", "server": "nas", "path": "/srv/datastores/a/data"}


@promise("S-282")
def test_a_class_supplies_the_capacity_of_a_datastore_without_one() -> None:
    classed = nfs_class(capacity="10Gi")
    assert effective_spec(body(OWN), classed, Settings()).spec.capacity == 10 << 30
    assert effective_spec(body({**OWN, "capacity": "1Gi"}), classed, Settings()).spec.capacity == 1 << 30
    assert effective_spec(body(OWN), nfs_class(), Settings()).spec.capacity is None


@promise("S-116")
def test_endpoints_hold_for_users_and_not_for_the_administrators_classes() -> None:
    """That what is not allowed is not asked either: tests/hostile/test_addresses.py."""
    only = Settings(policy=EndpointPolicy(endpoints=("https://s3.example.org",)))
    inside = {"s3": {"bucket": "digits", "credentialsSecret": "keys", "endpoint": "http://10.0.0.1:2379"}}
    assert effective_spec(body(inside), None, Settings()).spec.s3 is not None
    text = refused(inside, settings=only)
    assert text == "EndpointNotAllowed: spec.s3.endpoint: the administrator does not allow http://10.0.0.1:2379"
    assert effective_spec(body(OF_CLASS), storage_class(**SHARED, endpoint="http://10.0.0.1:9000"), only).spec.s3


@promise("S-289")
def test_nfs_servers_of_users_are_those_that_are_listed() -> None:
    spec = {"nfs": {"server": "nas.example.org", "path": "/a"}}
    assert "ALLOW_ENDPOINTS=nfs://nas.example.org" in refused(spec)
    open_to_s3 = Settings(policy=EndpointPolicy(endpoints=("https://*.example.org",), allow_ranges=("10.0.0.0/8",)))
    assert refused(spec, settings=open_to_s3).startswith("EndpointNotAllowed")
    listed = Settings(policy=EndpointPolicy(endpoints=("nfs://nas.example.org", "nfs://[fd00::1]")))
    assert effective_spec(body(spec), None, listed).secret is None
    assert effective_spec(body({"nfs": {"server": "fd00::1", "path": "/a"}}), None, listed)
    assert refused({"nfs": {"server": "other.example.org", "path": "/a"}}, settings=listed)
    s3 = {"s3": {"bucket": "digits", "credentialsSecret": "keys", "endpoint": "https://s3.example.com"}}
    assert effective_spec(body(s3), None, listed), "a list of NFS servers says nothing of others"


@promise("S-309")
def test_glusterfs_servers_of_users_are_those_that_are_listed() -> None:
    """Each of them, and as GlusterFS's."""
    spec = {"glusterfs": {"servers": ["g1.example.org", "g2.example.org"], "volume": "v"}}
    assert "ALLOW_ENDPOINTS=glusterfs://g1.example.org" in refused(spec)
    for endpoints in (("nfs://*.example.org",), ("glusterfs://g1.example.org",)):
        assert refused(spec, settings=Settings(policy=EndpointPolicy(endpoints=endpoints)))
    listed = Settings(policy=EndpointPolicy(endpoints=("glusterfs://*.example.org",)))
    assert effective_spec(body(spec), None, listed).kind.name == "glusterfs"


@promise("S-203")
@pytest.mark.parametrize(
    "server", ["127.0.0.1", "::1", "localhost", "169.254.169.254", "fd00:ec2::254", "10.96.0.1", "10.244.0.7"]
)
@pytest.mark.parametrize("backend", ["nfs", "glusterfs"])
def test_users_cannot_name_servers_inside_the_cluster(server: str, backend: str) -> None:
    """Whatever ranges are open to S3, and whatever other servers are listed."""
    where = (
        {"server": server, "path": "/a"} if backend == "nfs" else {"servers": ["g1.example.org", server], "volume": "v"}
    )
    listed = (f"{backend}://g1.example.org", f"{backend}://*.example.org", "http://*", f"http://{server}")
    for policy in (EndpointPolicy(), EndpointPolicy(endpoints=listed, allow_ranges=("0.0.0.0/0", "::/0"))):
        assert refused({backend: where}, settings=Settings(policy=policy)).startswith("EndpointNotAllowed")


def test_every_parameter_is_documented() -> None:
    from pathlib import Path

    text = (Path(__file__).parents[4] / "docs" / "reference" / "storageclass.md").read_text()
    parameters = {*COMMON, *(name for kind in KINDS.values() for name in kind.parameters)}
    assert [name for name in sorted(parameters) if f"`{name}`" not in text] == []
