"""datastore.api.volumecontext: what the controller writes, the CSI driver reads back."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datastore.api.datastore import Datastore, DatastoreSpec
from datastore.api.mountspec import MountSpec
from datastore.api.resolve import Place
from datastore.api.resources import DATASTORES
from datastore.api.secretmanifest import SecretManifest, for_storage
from datastore.api.source import NFSLocation, S3Location
from datastore.api.volumecontext import (
    EPHEMERAL,
    SOURCE,
    SPEC,
    Reference,
    VolumeHandle,
    from_context,
    mount_spec,
    settings_of,
    to_context,
)
from datastore.errors import InvalidManifest
from datastore.secret import Secret
from tests.promises import promise

CANARY = "CANARYsecretCANARYsecret"
PLACE = Place(mountpoint="/mnt/v", state_dir="/state/v", cache_dir="/cache")
KEYS = {"AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": CANARY}
PEM = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"


def bucket(spec: MountSpec) -> S3Location:
    assert isinstance(spec.source, S3Location)
    return spec.source


def spec(document: dict[str, Any]) -> DatastoreSpec:
    head = {"apiVersion": "datastore.dev/v1alpha1", "kind": "Datastore", "metadata": {"name": "a"}}
    return Datastore.model_validate({**head, "spec": document}).spec


def mounted(context: dict[str, str], secrets: dict[str, str], *, read_only: bool = False) -> MountSpec:
    return mount_spec("digits", context, secrets, PLACE, read_only=read_only)


FULL = {
    "s3": {
        "bucket": "digits",
        "prefix": "a/",
        "endpoint": "http://h:1",
        "region": "r",
        "forcePathStyle": True,
        "caBundle": PEM,
        "create": True,
        "credentialsSecret": "keys",
    },
    "readOnly": True,
    "capacity": "1Gi",
    "reclaimPolicy": "Delete",
    "cache": {"size": "5M"},
    "attributes": "full",
    "metadataTTL": "1m30s",
}


def test_a_mount_from_the_context_is_the_mount_of_the_manifest() -> None:
    found = mounted(to_context(spec(FULL)), KEYS)
    assert (bucket(found).bucket, bucket(found).prefix, bucket(found).endpoint, bucket(found).region) == (
        "digits",
        "a/",
        "http://h:1",
        "r",
    )
    assert (bucket(found).force_path_style, bucket(found).ca_bundle) == (True, PEM)
    assert (found.read_only, found.capacity_bytes, found.cache_size_bytes) == (True, 1 << 30, 5_000_000)
    assert (found.attributes, found.metadata_ttl_s, found.allow_other) == ("full", 90.0, True)
    assert (found.name, found.mountpoint, found.state_dir, found.cache_dir) == (
        "digits",
        "/mnt/v",
        "/state/v",
        "/cache",
    )
    credentials = bucket(found).credentials
    assert credentials is not None
    assert credentials.secret_access_key.reveal() == CANARY


def test_a_context_holds_what_a_mount_needs_and_nothing_else() -> None:
    assert to_context(spec({"s3": {"bucket": "digits"}})) == {SPEC: '{"s3":{"bucket":"digits"}}'}
    text = to_context(spec(FULL))[SPEC]
    assert not {"create", "credentialsSecret"} & set(json.loads(text)["s3"])
    assert "reclaimPolicy" not in json.loads(text)


def test_an_export_that_was_made_for_a_datastore_is_where_its_volume_says() -> None:
    export = NFSLocation(server="nfs.example.org", path="/srv/a", version="4.2", options=("softerr", "timeo=150"))
    found = mounted(to_context(spec({"nfs": {}, "capacity": "1Gi"}), source=export), {})
    assert (found.source, found.capacity_bytes) == (export, 1 << 30)
    existing = {"nfs": {"server": "nfs.example.org", "path": "/srv/b"}}
    assert mounted(to_context(spec(existing)), {}).source == NFSLocation(server="nfs.example.org", path="/srv/b")
    with pytest.raises(InvalidManifest, match="an export of its own"):
        mounted(to_context(spec({"nfs": {}})), {})


@pytest.mark.parametrize(
    ("backend", "source"),
    [
        ({"nfs": {}}, '{"kind": "local", "path": "/etc"}'),
        ({"nfs": {}}, '{"kind": "nfs", "server": "h"}'),
        ({"nfs": {}}, "["),
        ({"s3": {"bucket": "digits"}}, '{"kind": "nfs", "server": "h", "path": "/srv/a"}'),
    ],
)
def test_a_source_leads_to_no_directory_of_the_node_and_to_no_other_kind(backend: dict[str, Any], source: str) -> None:
    with pytest.raises(InvalidManifest, match=r"datastore\.dev/source"):
        mounted({SPEC: json.dumps(backend), SOURCE: source}, {})


def test_the_settings_of_a_status_are_those_of_a_volume() -> None:
    assert settings_of(spec(FULL)) == json.loads(to_context(spec(FULL))[SPEC])
    ssh = {"sftp": {"host": "h", "path": "/d", "credentialsSecret": "keys"}}
    assert settings_of(spec(ssh)) == {"sftp": {"host": "h", "path": "/d"}}


SIZES = st.integers(1, 1 << 62)


@given(
    document=st.fixed_dictionaries(
        {"s3": st.just({"bucket": "digits"})},
        optional={
            "readOnly": st.booleans(),
            "capacity": SIZES,
            "cache": st.fixed_dictionaries({}, optional={"size": SIZES}),
            "attributes": st.sampled_from(["listing", "full"]),
            "metadataTTL": st.integers(0, 86_400_000).map(lambda count: f"{count}ms"),
        },
    )
)
def test_every_spec_comes_back(document: dict[str, Any]) -> None:
    given_spec = spec(document)
    assert from_context(to_context(given_spec)) == given_spec


def test_read_only_of_a_pod_only_tightens() -> None:
    writable, tight = to_context(spec({"s3": {"bucket": "digits"}})), to_context(spec(FULL))
    assert mounted(writable, KEYS, read_only=True).read_only
    assert mounted(writable, KEYS, read_only=True).metadata_ttl_s == 60.0
    assert mounted(tight, KEYS, read_only=False).read_only


def test_an_inline_volume_has_its_fields_one_by_one() -> None:
    context = {"bucket": "digits", "prefix": "a", "readOnly": "true", "cacheSize": "5M", "metadataTTL": "2s"}
    found = mounted({**context, EPHEMERAL: "true", "csi.storage.k8s.io/pod.name": "p"}, KEYS)
    assert (bucket(found).bucket, bucket(found).prefix, found.read_only) == ("digits", "a/", True)
    assert (found.cache_size_bytes, found.metadata_ttl_s) == (5_000_000, 2.0)


def test_an_inline_volume_can_name_a_datastore() -> None:
    assert from_context({"datastore": "digits", "csi.storage.k8s.io/pod.name": "p"}) == Reference(name="digits")


@promise("S-213")
@pytest.mark.parametrize(
    "name", ["", "..", "../../other/datastores/x", "a/status", "a%2fb", "a?watch=1", "A", "a" * 254]
)
def test_a_reference_is_a_name_and_nothing_more(name: str) -> None:
    """The name becomes a part of a request to the API server."""
    with pytest.raises(InvalidManifest, match="is no name of a Datastore"):
        from_context({"datastore": name})
    assert DATASTORES.path("team", name or "x").count("/") == 7
    with pytest.raises(InvalidManifest, match="nothing else"):
        from_context({"datastore": "digits", "bucket": "other"})


def test_an_inline_volume_never_uses_the_identity_of_the_node() -> None:
    with pytest.raises(InvalidManifest, match="nodePublishSecretRef"):
        mounted({"bucket": "digits", EPHEMERAL: "true"}, {})
    assert bucket(mounted({"bucket": "digits"}, {})).credentials is None


@pytest.mark.parametrize(
    ("context", "complaint"),
    [
        ({}, r"spec\.s3\.bucket is missing"),
        ({"bucket": "digits", "prefx": "a"}, "prefx is not a field; did you mean"),
        ({"bucket": "digits", "readOnly": "yes"}, "spec.readOnly must be true or false"),
        ({SPEC: "{"}, "not a JSON object"),
        ({SPEC: "[]"}, "not a JSON object"),
        ({SPEC: '{"local":{"path":"/etc"}}'}, "spec.local is not mounted"),
        ({SPEC: '{"s3":{"bucket":"digits"},"cache":{"dir":"/etc"}}'}, "spec.cache.dir is for laptops"),
    ],
)
def test_a_wrong_context_is_refused_by_its_field(context: dict[str, str], complaint: str) -> None:
    with pytest.raises(InvalidManifest, match=complaint):
        mounted(context, KEYS)


def test_no_text_shows_a_key() -> None:
    with pytest.raises(InvalidManifest) as caught:
        mounted({"bucket": "digits", "region": "a b"}, {"AWS_SECRET_ACCESS_KEY": CANARY})
    assert CANARY not in str(caught.value)
    with pytest.raises(InvalidManifest, match="has no AWS_ACCESS_KEY_ID") as caught:
        mounted({"bucket": "digits"}, {"AWS_SECRET_ACCESS_KEY": CANARY})
    assert CANARY not in str(caught.value)


def test_the_certificate_may_come_with_the_keys_and_the_manifest_wins() -> None:
    secrets = {**KEYS, "ca.crt": PEM}
    assert bucket(mounted({"bucket": "digits"}, secrets)).ca_bundle == PEM
    assert bucket(mounted(to_context(spec(FULL)), {**KEYS, "ca.crt": "other"})).ca_bundle == PEM


@promise("S-204")
@pytest.mark.parametrize("name", ["ca.crt", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"])
def test_a_secret_with_a_value_that_no_storage_has_is_refused(name: str) -> None:
    with pytest.raises(InvalidManifest, match=f"{name} of Secret .* is longer than 65536 bytes") as caught:
        mounted({"bucket": "digits"}, {**KEYS, name: CANARY * 8000})
    assert CANARY not in str(caught.value)


@promise("S-204")
def test_a_backend_gets_only_its_own_keys_of_a_secret() -> None:
    """A large value beside the keys is left out."""
    keys = {"AWS_ACCESS_KEY_ID": Secret("a"), "AWS_SECRET_ACCESS_KEY": Secret("b"), "other": Secret("x" * 1_000_000)}
    found = for_storage(SecretManifest(name="s", namespace="n", values=keys))
    assert found.values.keys() == {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"}


def test_a_volume_handle_names_one_datastore_for_ever() -> None:
    handle = VolumeHandle(namespace="team", name="digits", uid="0b6d")
    assert str(handle) == "team/digits/0b6d"
    assert VolumeHandle.parse(str(handle)) == handle


@pytest.mark.parametrize("text", ["", "csi-0123", "a/b", "a//c", "a/b/c/d"])
def test_another_handle_is_refused(text: str) -> None:
    with pytest.raises(InvalidManifest, match="not NAMESPACE/NAME/UID"):
        VolumeHandle.parse(text)
