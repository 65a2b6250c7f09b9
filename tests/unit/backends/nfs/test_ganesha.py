"""datastore.backends.nfs.ganesha: the objects of a managed NFS server, over a cluster in memory."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from typing import Any

import pytest

from datastore.api.names import ARCHIVED, UID, volume_name
from datastore.api.resources import BY_KIND, CLAIMS, NETWORK_POLICIES, SERVICES, STATEFULSETS, Resource
from datastore.api.source import NFSLocation
from datastore.backends.base import Identity, Policy
from datastore.backends.nfs import ganesha
from datastore.backends.nfs.ganesha import GaneshaExport, configuration, numbers_of
from datastore.backends.nfs.parameters import parse_ganesha
from datastore.errors import InvalidManifest, NotFound, ServerStarting
from tests.promises import promise

GIB = 1 << 30
UID_A = "6f1c6b0e-6d5b-4a39-9a55-0d5f4a4b7c11"
CLASS = {"provisioner": "ganesha", "namespace": "exports", "claimStorageClass": "ssd", "clients": "10.1.0.0/16"}
HOSTILE = Identity(namespace="team", name='x"; } EXPORT { Path = /; $(reboot)', uid=UID_A)


class Objects:
    """A cluster, as far as a backend asks for it. ready: servers are as soon as they are applied.

    services: how many were made; each that asks for no address gets another one.
    """

    namespace = "datastore-system"

    def __init__(self, *, ready: bool = True) -> None:
        self.ready = ready
        self.services = 0
        self.there: dict[tuple[str, str, str], dict[str, Any]] = {}

    def get(self, kind: Resource, namespace: str, name: str) -> dict[str, Any] | None:
        return self.there.get((kind.plural, namespace, name))

    def apply(self, body: Mapping[str, Any], uid: str) -> dict[str, Any]:
        assert body["metadata"]["labels"][UID] == uid
        made = copy.deepcopy(dict(body))
        here = self.get(BY_KIND[body["kind"]], body["metadata"]["namespace"], body["metadata"]["name"])
        if body["kind"] == "Service" and here is None:
            self.services += 1
        if body["kind"] == "Service":
            made["spec"] = {"clusterIP": f"10.96.0.{76 + self.services}", **made["spec"]}
        if body["kind"] == "StatefulSet" and self.ready:
            made["status"] = {"readyReplicas": 1}
        self.there[(BY_KIND[body["kind"]].plural, body["metadata"]["namespace"], body["metadata"]["name"])] = made
        return made

    def delete(self, kind: Resource, namespace: str, name: str, uid: str) -> bool:
        return self.there.pop((kind.plural, namespace, name), None) is not None


def export(
    objects: Objects, *, identity: Identity = HOSTILE, capacity: int | None = GIB, made: bool = False, **given: str
) -> GaneshaExport:
    parameters = parse_ganesha({**CLASS, **given})
    nodes = ["10.0.0.7"]
    return GaneshaExport(identity, parameters, objects, lambda: nodes, capacity_bytes=capacity, made=made)


def one(objects: Objects, kind: Resource) -> dict[str, Any]:
    found = objects.get(kind, "exports", volume_name(UID_A))
    assert found is not None
    return found


@promise("S-291", "S-298")
def test_a_datastore_becomes_four_objects_named_after_its_uid() -> None:
    """An annotation is the only text of a user in them."""
    objects = Objects()
    found = export(objects).ensure()
    assert found.source == NFSLocation(server="10.96.0.77", path="/data", port=2049, mount_port=20048)
    name = volume_name(UID_A)
    kinds = {"statefulsets", "services", "networkpolicies", "persistentvolumeclaims"}
    assert set(objects.there) == {(kind, "exports", name) for kind in kinds}
    for body in objects.there.values():
        assert body["metadata"]["annotations"].pop("datastore.dev/datastore") == f"team/{HOSTILE.name}"
        assert "reboot" not in str(body)
    claim = one(objects, CLAIMS)["spec"]
    assert (claim["storageClassName"], claim["resources"]["requests"]["storage"]) == ("ssd", "1Gi")


@promise("S-294")
def test_a_service_that_somebody_removed_gets_its_address_again() -> None:
    """Volumes name the address for good; with another address no pod would reach the server."""
    objects = Objects()
    before = export(objects).ensure()
    for kind in (STATEFULSETS, SERVICES, NETWORK_POLICIES):
        objects.delete(kind, "exports", volume_name(UID_A), UID_A)
    assert export(objects).ensure() == before


@promise("S-286")
@pytest.mark.parametrize("namespace", ["exports", "elsewhere"])
def test_a_claim_that_was_made_and_is_gone_is_not_made_anew(namespace: str) -> None:
    """Programs would find an empty directory where their data was."""
    objects = Objects()
    export(objects).ensure()
    export(objects, made=True).ensure()
    objects.delete(CLAIMS, "exports", volume_name(UID_A), UID_A)
    before = dict(objects.there)
    with pytest.raises(NotFound, match=f"PersistentVolumeClaim {namespace}/{volume_name(UID_A)}.* is gone"):
        export(objects, made=True, namespace=namespace).ensure()
    assert objects.there == before


@promise("S-286")
def test_a_claim_that_is_being_deleted_is_told_with_the_command_that_keeps_the_data() -> None:
    """Kubernetes keeps it as long as the server's pod runs, and no longer."""
    objects = Objects()
    export(objects).ensure()
    claim = one(objects, CLAIMS)
    claim["metadata"]["deletionTimestamp"] = "2026-01-31T12:00:00Z"
    claim["spec"]["volumeName"] = "pv-7"
    with pytest.raises(NotFound, match=r"was deleted and goes .* `kubectl patch pv pv-7 .*Retain"):
        export(objects, made=True).ensure()


@promise("S-299")
def test_the_server_has_few_rights_and_no_token() -> None:
    objects = Objects()
    export(objects).ensure()
    pod = one(objects, STATEFULSETS)["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["automountServiceAccountToken"] is False
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
    assert container["securityContext"]["capabilities"]["drop"] == ["ALL"]
    assert "SYS_ADMIN" not in container["securityContext"]["capabilities"]["add"]
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    policy = one(objects, NETWORK_POLICIES)["spec"]
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    assert "egress" not in policy
    (rule,) = policy["ingress"]
    assert {each["port"] for each in rule["ports"]} == {2049, 20048}
    assert [each["ipBlock"]["cidr"] for each in rule["from"] if "ipBlock" in each] == ["10.1.0.0/16"]
    assert {each["port"] for each in one(objects, SERVICES)["spec"]["ports"]} == {2049, 20048}


@promise("S-292")
def test_until_the_export_is_served_the_error_names_what_to_describe() -> None:
    objects = Objects(ready=False)
    with pytest.raises(ServerStarting, match=f"kubectl -n exports describe pvc {volume_name(UID_A)}"):
        export(objects).ensure()
    with pytest.raises(InvalidManifest, match="capacity is missing"):
        export(Objects(), capacity=None).ensure()


@promise("S-295")
def test_the_claim_grows_and_never_shrinks() -> None:
    objects = Objects()
    for capacity, size in ((GIB, "1Gi"), (3 * GIB, "3Gi"), (2 * GIB, "3Gi")):
        export(objects, capacity=capacity).ensure()
        assert one(objects, CLAIMS)["spec"]["resources"]["requests"]["storage"] == size


@promise("S-297")
@pytest.mark.parametrize(("policy", "stays"), [(Policy.RETAIN, True), (Policy.ARCHIVE, True), (Policy.DELETE, False)])
def test_the_server_is_removed_and_the_claim_follows_the_policy(
    policy: Policy, stays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ganesha, "POLL_S", 0.0)
    objects = Objects()
    export(objects).ensure()
    released = export(objects).release(policy, lambda: True)
    assert released.done
    assert set(objects.there) == ({("persistentvolumeclaims", "exports", volume_name(UID_A))} if stays else set())
    if stays:
        marked = one(objects, CLAIMS)["metadata"]["labels"].get(ARCHIVED)
        assert marked == ("true" if policy is Policy.ARCHIVE else None)
    assert export(objects).release(policy, lambda: True).done


@promise("S-294")
def test_export_ids_are_stable_and_unique() -> None:
    assert numbers_of("a") == numbers_of("a")
    found = [numbers_of(f"uid-{number}") for number in range(2000)]
    assert all(0 < export_id < 65536 and fsid != (152, 152) for export_id, fsid in found)
    assert len({fsid for _, fsid in found}) == len(found)


@promise("S-298")
def test_the_configuration_has_nothing_but_numbers_networks_and_fixed_words() -> None:
    text = configuration(UID_A, parse_ganesha({**CLASS, "squash": "all", "group": "2000"}))
    assert re.search(r"CLIENT \{ Clients = 10\.1\.0\.0/16, 127\.0\.0\.1; Access_Type = RW; Squash = All_Squash;", text)
    assert "Anonymous_Uid = 65534; Anonymous_Gid = 2000;" in text
    everybody = configuration(UID_A, parse_ganesha({**CLASS, "clients": "10.1.0.0/16, ::/0"}))
    assert "CLIENT { Clients = *; " in everybody
    open_to_all = configuration(UID_A, parse_ganesha({key: CLASS[key] for key in CLASS if key != "clients"}))
    assert "CLIENT {" not in open_to_all
    assert "Access_Type = RW;" in open_to_all


@promise("S-292")
@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"namespace": ""}, "namespace"),
        ({"namespace": "a/b"}, "namespace"),
        ({"claimStorageClass": "x y"}, "claimStorageClass"),
        ({"image": "$(reboot)"}, "image"),
        ({"clients": "10.0.0.0/8; } EXPORT {"}, "clients"),
        ({"squash": "some"}, "squash"),
        ({"group": "-1"}, "group"),
        ({"host": "nas"}, "host is not for provisioner ganesha"),
    ],
)
def test_a_bad_class_is_refused_with_one_line(given: dict[str, str], complaint: str) -> None:
    with pytest.raises(InvalidManifest, match=complaint) as found:
        parse_ganesha({**CLASS, **given})
    assert "\n" not in str(found.value)
