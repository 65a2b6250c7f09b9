"""datastore.controller.classes: StorageClasses, and what a Datastore may name."""

from __future__ import annotations

from typing import Any

import pytest

from datastore.api.volumecontext import MEMORY
from datastore.controller import desired
from datastore.controller.classes import PARAMETERS, SecretRef, meant
from datastore.controller.desired import volume
from datastore.controller.mistakes import Mistake
from datastore.controller.settings import Settings


def body(spec: dict[str, Any]) -> dict[str, Any]:
    metadata = {"name": "digits", "namespace": "team", "uid": "0b6d"}
    return {"apiVersion": "datastore.dev/v1alpha1", "kind": "Datastore", "metadata": metadata, "spec": spec}


def storage_class(provisioner: str = "csi.datastore.dev", **parameters: str) -> dict[str, Any]:
    return {"metadata": {"name": "c"}, "provisioner": provisioner, "parameters": parameters}


def refused(spec: dict[str, Any], with_class: dict[str, Any] | None = None, settings: Settings | None = None) -> str:
    with pytest.raises(Mistake) as caught:
        meant(body(spec), with_class, settings or Settings())
    assert caught.value.permanent
    return f"{caught.value.reason}: {caught.value}"


OF_CLASS = {"storageClassName": "c"}


def test_a_class_says_everything() -> None:
    secret = {"secretName": "keys", "secretNamespace": "admin"}
    parameters = {
        "bucket": "b-${pvc.namespace}",
        "endpoint": "https://h",
        "create": "true",
        "cacheSize": "1Gi",
        **secret,
    }
    found = meant(body({**OF_CLASS, "capacity": "3Gi"}), storage_class(**parameters), Settings())
    assert found.spec.s3 is not None
    assert (found.spec.s3.bucket, found.spec.s3.prefix, found.spec.s3.create) == ("b-team", "team/digits/", True)
    assert (found.spec.capacity, found.spec.cache.size) == (3 << 30, 1 << 30)
    assert (found.secret, found.class_name) == (SecretRef(namespace="admin", name="keys"), "c")


def test_the_names_of_other_drivers_parameters_work_too() -> None:
    standard = "csi.storage.k8s.io/node-publish-secret-"
    parameters = {"bucket": "shared", f"{standard}name": "keys", f"{standard}namespace": "admin"}
    assert meant(body(OF_CLASS), storage_class(**parameters), Settings()).secret == SecretRef(
        namespace="admin", name="keys"
    )


SHARED = {"bucket": "shared", "secretName": "k", "secretNamespace": "n"}


@pytest.mark.parametrize(
    ("parameters", "complaint"),
    [
        ({}, "bucket is missing"),
        ({**SHARED, "buckets": "x"}, "buckets is not known"),
        ({**SHARED, "create": "yes"}, "create must be 'true' or 'false'"),
        ({**SHARED, "prefix": "${user}/"}, "is not known; there are"),
        ({"bucket": "shared", "secretName": "k"}, "go together"),
        ({**SHARED, "endpoint": "ftp://h"}, "spec.s3.endpoint must be a URL"),
        ({**SHARED, "prefix": "${pvc.namespace}-${pvc.name}/"}, "no two claims share a place"),
        ({**SHARED, "prefix": "${pvc.name}.${pvc.namespace}/"}, "no two claims share a place"),
    ],
)
def test_a_wrong_class_is_refused_by_its_parameter(parameters: dict[str, str], complaint: str) -> None:
    text = refused(OF_CLASS, storage_class(**parameters))
    assert text.startswith("StorageClassInvalid: StorageClass c: parameters: ")
    assert complaint in text


def test_a_classes_mount_options_are_those_of_its_volumes() -> None:
    """S-78"""
    classed = {**storage_class(**SHARED), "mountOptions": ["uid=1000", "umask=027"]}
    found = meant(body(OF_CLASS), classed, Settings())
    volume = desired.volume(found, "")
    assert volume is not None
    assert volume["spec"]["mountOptions"] == ["uid=1000", "umask=027"]
    plain = desired.volume(meant(body(OF_CLASS), storage_class(**SHARED), Settings()), "")
    assert plain is not None
    assert not desired.volume_holds(volume, plain)
    assert desired.volume_holds(volume, volume)


def test_another_class_is_named() -> None:
    assert refused(OF_CLASS).startswith("StorageClassNotFound")
    assert refused(OF_CLASS, storage_class("ebs.csi.aws.com")).startswith("StorageClassNotOurs")


def test_a_user_with_a_class_names_no_bucket() -> None:
    """So nobody reaches with the administrator's keys what the class did not choose."""
    text = refused({**OF_CLASS, "s3": {"bucket": "other"}}, storage_class(**SHARED))
    assert "must have exactly one of" in text


def test_a_user_without_a_class_names_a_secret_of_the_own_namespace() -> None:
    found = meant(body({"s3": {"bucket": "digits", "credentialsSecret": "keys"}}), None, Settings())
    assert found.secret == SecretRef(namespace="team", name="keys")
    assert refused({"s3": {"bucket": "digits"}}).startswith("CredentialsMissing")
    lent = meant(body({"s3": {"bucket": "digits"}}), None, Settings(ambient_credentials=True))
    assert lent.secret is None


def test_what_is_not_for_clusters_is_refused() -> None:
    s3 = {"bucket": "digits", "credentialsSecret": "keys"}
    assert "for laptops" in refused({"s3": s3, "cache": {"dir": "/etc"}})
    assert refused({"nfs": {"server": "h", "path": "/a"}}).startswith("BackendNotSupported")
    assert refused({"s3": {"bucket": "NO"}}).startswith("InvalidSpec: spec.s3.bucket")


def test_a_class_chooses_the_memory_of_its_mounts() -> None:
    """S-118"""
    found = meant(body(OF_CLASS), storage_class(**SHARED, memory="256Mi"), Settings())
    made = volume(found, "")
    assert made is not None
    assert made["spec"]["csi"]["volumeAttributes"][MEMORY] == "256Mi"
    assert "memory must be at least 192Mi" in refused(OF_CLASS, storage_class(**SHARED, memory="1Mi"))
    other = volume(meant(body(OF_CLASS), storage_class(**SHARED), Settings()), "")
    assert other is not None
    assert MEMORY not in other["spec"]["csi"]["volumeAttributes"]


def test_every_parameter_is_documented() -> None:
    from pathlib import Path

    text = (Path(__file__).parents[3] / "docs" / "reference" / "storageclass.md").read_text()
    assert [name for name in PARAMETERS if f"`{name}`" not in text] == []
