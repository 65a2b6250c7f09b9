"""Which objects show one version of a store, from the store's own volume as its controller makes it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from datastore.api.volumecontext import CLASS, DRIVER, SOURCE, SPEC, from_context
from datastore.controller.models.volume import MANAGER, version_volume
from datastore.controller.runtime.mistakes import Mistake
from tests.promises import promise

OWNER = {
    "apiVersion": "datastore.dev/v1alpha1",
    "kind": "ModelVersion",
    "metadata": {"name": "digits-7", "namespace": "team", "uid": "u-1"},
}
KEYS = {"name": "keys", "namespace": "admin"}
BUCKET = {"bucket": "bucket", "prefix": "team/", "endpoint": "https://s3.example.org"}


def store(mount: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"metadata": {"name": "models", "namespace": "team"}, "status": {"mount": mount} if mount else {}}


def volume(attributes: dict[str, str], driver: str = DRIVER) -> dict[str, Any]:
    csi = {"driver": driver, "volumeHandle": "team/models/u-0", "volumeAttributes": attributes}
    return {"spec": {"csi": {**csi, "nodePublishSecretRef": KEYS, "nodeStageSecretRef": KEYS}}}


def made(datastore: dict[str, Any], of: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    return version_volume(datastore, of, model="digits", number=7, claim="digits-7", owner=OWNER)


@promise("S-392")
def test_a_version_in_a_bucket() -> None:
    """Its directory alone, read-only, by the store's Secret and the settings that count now."""
    mount = {"spec": {"s3": {**BUCKET, "region": "eu-1"}, "writeBack": {"maxDelay": "10s"}}}
    found, claim = made(store(mount), volume({SPEC: json.dumps({"s3": BUCKET}), CLASS: "fast"}))
    csi = found["spec"]["csi"]
    spec = from_context(csi["volumeAttributes"])
    assert spec.s3.prefix == "team/digits/7/"  # type: ignore[union-attr]
    assert spec.s3.region == "eu-1"  # type: ignore[union-attr]
    assert spec.read_only  # type: ignore[union-attr]
    assert spec.write_back is None  # type: ignore[union-attr]
    assert csi["volumeAttributes"][CLASS] == "fast"
    assert (csi["readOnly"], csi["nodePublishSecretRef"], csi["nodeStageSecretRef"]) == (True, KEYS, KEYS)
    assert csi["volumeHandle"] == found["metadata"]["name"] == claim["spec"]["volumeName"] == "model-version-u-1-7"
    assert found["spec"]["claimRef"]["name"] == claim["metadata"]["name"] == "digits-7"
    assert found["spec"]["accessModes"] == claim["spec"]["accessModes"] == ["ReadOnlyMany"]
    assert claim["metadata"]["ownerReferences"][0]["uid"] == "u-1"
    assert found["metadata"]["labels"]["app.kubernetes.io/managed-by"] == MANAGER


@promise("S-392")
def test_a_version_on_an_export() -> None:
    """Below the export that was made for the store, or below the one that it names."""
    export = {"kind": "nfs", "server": "host", "path": "/exports/team"}
    found, _ = made(store(), volume({SPEC: '{"nfs":{}}', SOURCE: json.dumps(export), CLASS: "nfs"}))
    assert json.loads(found["spec"]["csi"]["volumeAttributes"][SOURCE])["path"] == "/exports/team/digits/7"
    named = {"nfs": {"server": "host", "path": "/a"}}
    found, _ = made(store(), volume({SPEC: json.dumps(named)}))
    assert from_context(found["spec"]["csi"]["volumeAttributes"]).nfs.path == "/a/digits/7"  # type: ignore[union-attr]


def test_a_version_in_a_directory_of_the_node() -> None:
    found, _ = made(store(), {"spec": {"hostPath": {"path": "/srv/models", "type": "Directory"}}})
    assert found["spec"]["hostPath"] == {"path": "/srv/models/digits/7", "type": "Directory"}


def test_another_drivers_volume_is_refused() -> None:
    with pytest.raises(Mistake, match="keep models in s3 or nfs"):
        made(store(), volume({}, driver="ebs.csi.aws.com"))
