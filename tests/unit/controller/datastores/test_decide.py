"""datastore.controller.datastores.decide, deleting, desired, conditions: the core, without a cluster."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from datastore import errors
from datastore.api.names import FINALIZER, MANAGED_BY, MANAGER, NUDGED, UID, volume_name
from datastore.api.reasons import REASONS
from datastore.api.source import NFSLocation
from datastore.api.status import CONDITION_TYPES, Capabilities, DatastoreStatus
from datastore.api.volumecontext import DRIVER, SOURCE
from datastore.backends.base import Measured, Owner, Policy
from datastore.controller.datastores import desired
from datastore.controller.datastores.decide import Facts, Observed, Plan, believed, decide
from datastore.controller.datastores.deletion import DeletionState, orphans, plan_deletion
from datastore.controller.datastores.effective import EffectiveSpec, effective_spec
from datastore.controller.datastores.settings import Settings
from datastore.controller.runtime.comparing import holds
from datastore.controller.runtime.conditions import Finding, merged, transitions
from datastore.controller.runtime.mistakes import Mistake, message_of, reason_of
from tests.promises import promise
from tests.unit.controller.datastores.test_effective import SHARED, nfs_class

NOW = "2026-01-31T12:00:00Z"
EARLIER = "2026-01-31T11:00:00Z"
UID_OF = "0b6d"
WORKS = Facts(capabilities=Capabilities.model_validate({"rename": True}))
SPEC: dict[str, Any] = {"s3": {"bucket": "digits", "endpoint": "http://h:1", "credentialsSecret": "keys"}}


def body(spec: dict[str, Any] | None = None, **metadata: Any) -> dict[str, Any]:
    plain = {"name": "digits", "namespace": "team", "uid": UID_OF, "generation": 3, "finalizers": [FINALIZER]}
    return {
        "apiVersion": "datastore.dev/v1alpha1",
        "kind": "Datastore",
        "metadata": {**plain, **metadata},
        "spec": spec or SPEC,
    }


def wanted(spec: dict[str, Any] | None = None) -> EffectiveSpec:
    return effective_spec(body(spec), None, Settings(local_paths=frozenset({"/srv/a"})))


def claim_of(what: EffectiveSpec, phase: str = "Bound", **metadata: Any) -> dict[str, Any]:
    made = desired.claim(what)
    assert made is not None
    made["metadata"] |= {"uid": "c-1", "creationTimestamp": EARLIER, **metadata}
    return {**made, "status": {"phase": phase}}


def volume_of(what: EffectiveSpec, **metadata: Any) -> dict[str, Any]:
    made = desired.volume(what, "c-1")
    assert made is not None
    made["metadata"] |= {"uid": "v-1", **metadata}
    return {**made, "status": {"phase": "Available"}}


def seen(datastore: dict[str, Any] | None = None, **more: Any) -> Observed:
    what = more.pop("effective") if "effective" in more else wanted((datastore or body())["spec"])
    facts = more.pop("facts", WORKS)
    rest: dict[str, Any] = {"claim": None, "volume": None, "now": NOW, **more}
    return Observed(datastore=datastore or body(), effective=what, facts=facts, **rest)


def settled(spec: dict[str, Any] | None = None, **more: Any) -> Observed:
    what = wanted(spec)
    return seen(body(spec), effective=what, claim=claim_of(what), volume=volume_of(what), **more)


def conditions(plan: Plan) -> dict[str, tuple[str, str]]:
    return {each["type"]: (each["status"], each["reason"]) for each in plan.status["conditions"]}


def test_the_finalizer_comes_before_anything_is_made() -> None:
    plan = decide(seen(body(finalizers=[]), facts=None))
    assert (plan.finalizer, plan.apply, plan.look) == (True, (), False)


def test_the_backend_is_probed_before_anything_is_made() -> None:
    assert decide(seen(facts=None)) == Plan(look=True, again=True)


def test_the_volume_comes_before_the_claim() -> None:
    """A claim whose volume the cluster has not seen yet waits 15 s for it."""
    first = decide(seen())
    assert [each["kind"] for each in first.apply] == ["PersistentVolume"]
    assert "uid" not in first.apply[0]["spec"]["claimRef"]
    volume = volume_of(wanted())
    assert decide(seen(volume={**volume, "status": {}})) == Plan(soon=True)
    second = decide(seen(volume=volume))
    assert [each["kind"] for each in second.apply] == ["PersistentVolumeClaim"]
    assert second.unless_claimed == second.apply[0]


def test_objects_that_are_as_wanted_are_only_reported() -> None:
    plan = decide(settled())
    assert (plan.apply, plan.replace, plan.again, plan.ready) == ((), None, False, True)
    assert conditions(plan) == {
        "Ready": ("True", "Ready"),
        "Provisioned": ("True", "Bound"),
        "CredentialsValid": ("True", "Accepted"),
        "Degraded": ("False", "AsExpected"),
    }
    assert tuple(conditions(plan)) == CONDITION_TYPES
    assert [(each.reason, each.warning) for each in plan.events] == [("Ready", False)]


def test_the_status_fits_its_schema() -> None:
    facts = replace(WORKS, measured=Measured(objects=2, size_bytes=2048), measured_at=NOW, owner=Owner.THIS)
    status = DatastoreStatus.model_validate(decide(settled({**SPEC, "reclaimPolicy": "Delete"}, facts=facts)).status)
    assert status.usage is not None
    assert (status.usage.size, status.claim_name, status.volume_name) == ("2 KiB", "digits", volume_name(UID_OF))
    assert (status.phase, status.observed_generation) == ("Ready", 3)
    assert status.on_deletion == "all of s3://digits/ is removed (Delete)"


def test_deciding_twice_makes_no_second_event() -> None:
    first = decide(settled())
    again = settled()
    second = decide(replace(again, datastore={**again.datastore, "status": first.status}, now="2026-02-01T00:00:00Z"))
    assert (second.status, second.events) == (first.status, ())


FAILURES = [
    (errors.BucketNotFound("x"), "BucketNotFound", "True"),
    (errors.CredentialsInvalid("x"), "CredentialsInvalid", "False"),
    (errors.AccessDenied("x"), "AccessDenied", "True"),
    (errors.WrongRegion("x"), "WrongRegion", "Unknown"),
    (errors.Unreachable("x"), "EndpointUnreachable", "Unknown"),
    (errors.DeadlineExceeded("x"), "EndpointUnreachable", "Unknown"),
    (Mistake("SecretNotFound", "x"), "SecretNotFound", "False"),
]


@pytest.mark.parametrize(("error", "reason", "credentials"), FAILURES)
def test_each_failure_has_its_reason_and_makes_nothing(
    error: errors.DatastoreError, reason: str, credentials: str
) -> None:
    plan = decide(seen(facts=Facts(error=error)))
    assert plan.apply == ()
    found = conditions(plan)
    assert found["Ready"] == ("False", reason)
    assert found["CredentialsValid"][0] == credentials
    assert found["Degraded"][0] == "False"
    assert plan.events[0].warning


def test_a_datastore_that_worked_and_fails_is_degraded_and_keeps_its_objects() -> None:
    now = settled()
    worked = {**now.datastore, "status": decide(now).status}
    plan = decide(replace(now, datastore=worked, facts=Facts(error=errors.Unreachable("no route"))))
    found = conditions(plan)
    assert found["Degraded"] == ("True", "EndpointUnreachable")
    assert found["Provisioned"][0] == "True"
    assert found["CredentialsValid"][0] == "True"
    assert plan.status["capabilities"] == {"rename": True}


def test_a_spec_that_cannot_be_acted_on_is_reported() -> None:
    mistake = Mistake("InvalidSpec", "spec.x is wrong", permanent=True)
    plan = decide(
        Observed(datastore=body(), effective=None, facts=Facts(error=mistake), claim=None, volume=None, now=NOW)
    )
    assert conditions(plan)["Ready"] == ("False", "InvalidSpec")
    assert plan.status["phase"] == "Failed"


def test_a_claim_of_someone_else_is_left_alone() -> None:
    foreign = {"metadata": {"name": "digits", "uid": "x"}, "spec": {}, "status": {}}
    plan = decide(seen(claim=foreign))
    assert plan.apply == ()
    assert conditions(plan)["Ready"] == ("False", "NameTaken")


def test_edited_labels_are_put_back() -> None:
    now = settled()
    assert now.claim is not None
    edited = {**now.claim, "metadata": {**now.claim["metadata"], "labels": {MANAGED_BY: MANAGER, UID: UID_OF}}}
    edited["metadata"]["annotations"] = {}
    plan = decide(replace(now, claim=edited))
    assert [each["kind"] for each in plan.apply] == ["PersistentVolumeClaim"]


def test_a_claim_that_is_being_deleted_is_reported_and_not_touched() -> None:
    what = wanted()
    plan = decide(seen(claim=claim_of(what, deletionTimestamp=NOW), volume=volume_of(what)))
    assert plan.apply == ()
    assert conditions(plan)["Ready"] == ("False", "ClaimDeleted")
    ready = next(each for each in plan.status["conditions"] if each["type"] == "Ready")
    assert "`kubectl describe pvc digits` names those that do" in ready["message"]


def test_a_volume_that_somebody_deletes_is_made_anew() -> None:
    what = wanted()
    plan = decide(seen(claim=claim_of(what), volume=volume_of(what, deletionTimestamp=NOW)))
    assert plan.replace is not None
    assert plan.replace["metadata"]["name"] == volume_name(UID_OF)


@promise("S-248")
@pytest.mark.parametrize(
    ("edit", "told"),
    [
        ({"metadataTTL": "5s"}, {"metadataTTL": "5s"}),
        ({"readOnly": True}, {"readOnly": True}),
        ({"s3": {**SPEC["s3"], "region": "r"}}, {"s3": {"bucket": "digits", "endpoint": "http://h:1", "region": "r"}}),
    ],
)
def test_an_edit_changes_what_the_nodes_read_and_never_the_source_of_the_volume(
    edit: dict[str, Any], told: dict[str, Any]
) -> None:
    before, after = volume_of(wanted()), {**SPEC, **edit}
    plan = decide(seen(body(after), claim=claim_of(wanted()), volume=before))
    for each in plan.apply:
        assert each["kind"] == "PersistentVolume"
        assert each["spec"]["csi"] == before["spec"]["csi"]
    assert plan.replace is None
    told_by = decide(
        seen(body(after), claim=claim_of(wanted()), volume={**before, **(plan.apply[0] if plan.apply else {})})
    )
    assert told.items() <= told_by.status["mount"]["spec"].items()


RESIZED: dict[str, Any] = {
    "allocatedResources": {"storage": "5Gi"},
    "allocatedResourceStatuses": None,
    "conditions": [],
}


@promise("S-249")
def test_a_claim_says_that_its_volume_grows_before_it_does() -> None:
    """The kubelet, which sees the volume at once, finds there how far it may go."""
    small, larger = {**SPEC, "capacity": "2Gi"}, {**SPEC, "capacity": "5Gi"}
    claim = claim_of(wanted(small))
    claim["status"]["capacity"] = {"storage": "2Gi"}
    plan = decide(seen(body(larger), claim=claim, volume=volume_of(wanted(small))))
    assert plan.apply[-1]["spec"]["capacity"] == {"storage": "5Gi"}
    assert plan.claim_status["allocatedResources"] == {"storage": "5Gi"}
    assert plan.claim_status["allocatedResourceStatuses"] == {"storage": "NodeResizePending"}
    claim["status"] = {"phase": "Pending"}
    assert decide(seen(body(larger), claim=claim, volume=volume_of(wanted(small)))).claim_status == {}


@promise("S-249")
def test_the_claim_of_a_grown_volume_gets_the_new_size() -> None:
    """First to the kubelets of pods that use it; where none does, by us."""
    larger = {**SPEC, "capacity": "5Gi"}
    claim = claim_of(wanted(larger))
    claim["status"]["capacity"] = {"storage": "2Gi"}
    grown = volume_of(wanted(larger))
    first = decide(seen(body(larger), claim=claim, volume=grown))
    (pending,) = first.claim_status["conditions"]
    assert (pending["type"], first.soon) == ("FileSystemResizePending", True)
    claim["status"]["conditions"] = [{**pending, "lastTransitionTime": NOW}]
    waiting = decide(seen(body(larger), claim=claim, volume=grown))
    assert (waiting.claim_status, waiting.soon, waiting.ready) == ({}, True, True)
    claim["status"]["conditions"] = [{**pending, "lastTransitionTime": "2026-01-31T11:00:00Z"}]
    last = decide(seen(body(larger), claim=claim, volume=grown))
    assert last.claim_status == {"capacity": {"storage": "5Gi"}, **RESIZED}
    claim["status"]["capacity"] = {"storage": "5Gi"}
    assert decide(seen(body(larger), claim=claim, volume=grown)).ready


@promise("S-249")
def test_a_claim_shows_a_capacity_that_is_set_later() -> None:
    limited = {**SPEC, "capacity": "5Gi"}
    claim = claim_of(wanted(limited))
    claim["status"]["capacity"] = {"storage": "1Pi"}
    plan = decide(seen(body(limited), claim=claim, volume=volume_of(wanted(limited))))
    assert plan.claim_status == {"capacity": {"storage": "5Gi"}, **RESIZED}


def test_a_new_claim_gets_the_old_volume() -> None:
    what = wanted()
    plan = decide(seen(claim=claim_of(what, "Pending", uid="c-2"), volume=volume_of(what)))
    assert [each["spec"]["claimRef"]["uid"] for each in plan.apply] == ["c-2"]


def test_binding_is_waited_for_quietly_at_first() -> None:
    what = wanted()
    young = claim_of(what, "Pending", creationTimestamp=NOW)
    assert decide(seen(claim=young, volume=volume_of(what))) == Plan(soon=True)
    old = decide(seen(claim=claim_of(what, "Pending"), volume=volume_of(what)))
    assert conditions(old)["Ready"] == ("False", "WaitingForBinding")
    assert old.status["phase"] == "Pending"


@promise("S-138")
@pytest.mark.parametrize(
    ("made_at", "nudged_at", "nudges"),
    [
        ("2026-01-31T11:59:59Z", "", True),
        (NOW, "", False),
        ("2026-01-31T11:59:50Z", NOW, False),
        ("2026-01-31T11:59:50Z", "2026-01-31T11:59:59Z", True),
        ("2026-01-31T11:59:45Z", "", False),
    ],
)
def test_a_claim_that_the_cluster_left_half_bound_is_changed(made_at: str, nudged_at: str, nudges: bool) -> None:
    """It looks at a claim that changes at once, and else after 15 s."""
    what = wanted()
    claim = claim_of(what, "Pending", creationTimestamp=made_at)
    claim["metadata"]["annotations"] |= {NUDGED: nudged_at} if nudged_at else {}
    plan = decide(seen(claim=claim, volume=volume_of(what)))
    assert bool(plan.apply) is nudges
    for each in plan.apply:
        assert (each["kind"], each["metadata"]["annotations"][NUDGED]) == ("PersistentVolumeClaim", NOW)
        assert each["metadata"]["labels"] == claim["metadata"]["labels"]
    unbound = desired.volume(what, "")
    assert unbound is not None
    not_begun = {**unbound, "metadata": {**unbound["metadata"], "uid": "v-1"}, "status": {"phase": "Available"}}
    assert decide(seen(claim=claim, volume=not_begun)).apply == (), "the volume is not bound yet either"


@pytest.mark.parametrize(
    ("spec", "claim", "expected"),
    [
        ({"claim": {"name": "disk"}}, None, ("False", "ClaimNotFound")),
        ({"claim": {"name": "disk"}}, ("Bound", "v"), ("True", "Ready")),
        ({"claim": {"name": "disk"}}, ("Pending", "v"), ("False", "WaitingForBinding")),
        ({"claim": {"name": "disk"}}, ("Lost", "v"), ("False", "ClaimLost")),
    ],
)
def test_a_wrapped_claim(spec: dict[str, Any], claim: tuple[str, str] | None, expected: tuple[str, str]) -> None:
    there = None
    if claim is not None:
        there = {"metadata": {"name": "disk"}, "spec": {"volumeName": claim[1]}, "status": {"phase": claim[0]}}
    plan = decide(seen(body(spec), claim=there))
    assert plan.apply == ()
    assert conditions(plan)["Ready"] == expected
    assert plan.status["claimName"] == "disk"


LATE = {"metadata": {"name": "disks"}, "provisioner": "disks.example", "volumeBindingMode": "WaitForFirstConsumer"}
AT_ONCE = {**LATE, "volumeBindingMode": "Immediate"}


@promise("S-148")
@pytest.mark.parametrize(
    ("named", "storage_class", "expected", "phase"),
    [
        ("disks", LATE, ("True", "WaitingForFirstPod"), "Ready"),
        ("disks", AT_ONCE, ("False", "WaitingForBinding"), "Pending"),
        ("disks", {"metadata": {"name": "disks"}}, ("False", "WaitingForBinding"), "Pending"),
        ("disks", None, ("False", "StorageClassNotFound"), "Failed"),
        (None, None, ("False", "StorageClassNotFound"), "Failed"),
        ("", None, ("False", "WaitingForBinding"), "Pending"),
    ],
)
def test_a_claim_without_a_volume_waits_only_for_what_can_come(
    named: str | None, storage_class: dict[str, Any] | None, expected: tuple[str, str], phase: str
) -> None:
    spec = {} if named is None else {"storageClassName": named}
    disk = {"metadata": {"name": "disk"}, "spec": spec, "status": {"phase": "Pending"}}
    own = claim_of(wanted({"claim": {"storageClassName": "disks"}}), "Pending")
    own["spec"] = {**own["spec"], "storageClassName": named}
    for given, claim in (({"name": "disk"}, disk), ({"storageClassName": "disks"}, own)):
        plan = decide(seen(body({"claim": given}), claim=claim, storage_class=storage_class))
        assert (conditions(plan)["Provisioned"], plan.status["phase"]) == (expected, phase)
        told = plan.status["conditions"][0]["message"]
        if expected[1] == "StorageClassNotFound":
            assert "kubectl get storageclass" in told
            assert (named or "default") in told
        bound = {**claim, "status": {"phase": "Bound"}}
        assert decide(seen(body({"claim": given}), claim=bound)).ready, "whatever became of the class"


@promise("S-72")
def test_a_claim_whose_volume_was_replaced_is_bound_again_without_an_alarm() -> None:
    """The cluster calls it Lost, and looks at it when it changes, or after 15 s."""
    what = wanted()
    claim = claim_of(what, "Lost")
    fresh = seen(claim=claim, volume=volume_of(what, creationTimestamp="2026-01-31T11:59:58Z"))
    plan = decide(fresh)
    assert [(each["kind"], each["metadata"]["annotations"][NUDGED]) for each in plan.apply] == [
        ("PersistentVolumeClaim", NOW)
    ]
    assert plan.soon
    assert (conditions(plan)["Provisioned"], plan.status["phase"]) == (("False", "VolumeReplacing"), "Pending")
    assert "no data" in plan.status["conditions"][0]["message"]
    assert not any(each.warning for each in plan.events)
    claim["metadata"]["annotations"] |= {NUDGED: NOW}
    assert decide(fresh).apply == (), "once a second"
    assert decide(fresh).soon
    late = decide(seen(claim=claim, volume=volume_of(what, creationTimestamp=EARLIER)))
    assert (conditions(late)["Provisioned"], late.apply) == (("False", "ClaimLost"), ())


@promise("S-115")
def test_capabilities_found_for_one_volume_are_not_reported_for_the_next() -> None:
    spec = {"claim": {"name": "disk", "probe": True}}
    claim = {"metadata": {"name": "disk"}, "spec": {"volumeName": "v-1"}, "status": {"phase": "Bound"}}
    facts = replace(WORKS, measured=Measured(objects=2, size_bytes=7), measured_at=NOW)
    first = decide(seen(body(spec), claim=claim, facts=facts)).status
    assert (first["volumeName"], first["capabilities"], first["usage"]["objects"]) == ("v-1", {"rename": True}, 2)
    told = {**body(spec), "status": first}
    assert decide(seen(told, claim=claim, facts=Facts())).status == first
    second = decide(seen(told, claim={**claim, "spec": {"volumeName": "v-2"}}, facts=Facts())).status
    assert second["volumeName"] == "v-2"
    assert not {"capabilities", "usage"} & set(second)


def test_a_volume_holds_what_the_driver_needs_and_no_secret() -> None:
    volume = desired.volume(wanted({**SPEC, "readOnly": True, "capacity": "5Gi"}), "c-1")
    assert volume is not None
    source = volume["spec"]["csi"]
    assert (source["driver"], source["volumeHandle"]) == ("csi.datastore.dev", f"team/digits/{UID_OF}")
    assert source["nodePublishSecretRef"] == source["nodeStageSecretRef"] == {"name": "keys", "namespace": "team"}
    assert "readOnly" not in source, "it can change, and the nodes read it elsewhere"
    assert volume["spec"]["capacity"] == {"storage": "5Gi"}
    assert volume["spec"]["accessModes"] == ["ReadOnlyMany"]
    assert volume["spec"]["persistentVolumeReclaimPolicy"] == "Retain"


def test_a_local_directory_becomes_a_host_path_where_it_is_allowed() -> None:
    volume = desired.volume(wanted({"local": {"path": "/srv/a"}}), "")
    assert volume is not None
    assert volume["spec"]["hostPath"] == {"path": "/srv/a", "type": "Directory"}
    for path in ("/etc", "/srv/a/link", "/srv"):
        with pytest.raises(Mistake, match=f"does not allow {path} .--allow-local"):
            wanted({"local": {"path": path}})


@promise("S-40")
def test_a_local_directory_is_not_called_read_only_because_kubernetes_would_let_pods_write() -> None:
    with pytest.raises(Mistake, match=r"spec\.readOnly: .* set readOnly at the volume of each pod"):
        wanted({"local": {"path": "/srv/a"}, "readOnly": True})


@pytest.mark.parametrize(
    ("observed", "expected", "same"),
    [
        ({"a": 1, "b": 2}, {"a": 1}, True),
        ({"a": 2}, {"a": 1}, False),
        ({}, {"a": ""}, True),
        ({"storage": "1024Mi"}, {"storage": "1Gi"}, True),
        ({"storage": "1G"}, {"storage": "1Gi"}, False),
        ({"l": [{"n": "x", "m": 1}]}, {"l": [{"n": "x"}]}, True),
        ({"l": []}, {"l": ["x"]}, False),
    ],
)
def test_holds(observed: dict[str, Any], expected: dict[str, Any], same: bool) -> None:
    assert holds(observed, expected) is same


# -- deletion

S3_DELETE = {**SPEC, "reclaimPolicy": "Delete"}


def going(spec: dict[str, Any] | None = None, **more: Any) -> DeletionState:
    what = more.pop("effective", wanted(spec or S3_DELETE))
    gone: dict[str, Any] = {"claim": None, "volume": None, "pods": (), "now": NOW, **more}
    datastore = body(spec or S3_DELETE, deletionTimestamp=NOW)
    datastore["status"] = {"capabilities": {"rename": True}}
    return DeletionState(datastore=datastore, effective=what, **gone)


def test_deletion_removes_claim_volume_data_and_finalizer_in_this_order() -> None:
    what = wanted(S3_DELETE)
    claim, volume = claim_of(what), volume_of(what)
    first = plan_deletion(going(claim=claim, volume=volume))
    assert first.delete == (claim,)
    held = claim_of(what, deletionTimestamp=NOW)
    waiting = plan_deletion(going(claim=held, volume=volume, pods=None))
    assert (waiting.delete, waiting.list_pods, waiting.release, waiting.finish) == ((), True, None, False)
    named = plan_deletion(going(claim=held, volume=volume, pods=("train",)))
    assert "in use by: train" in named.status["conditions"][0]["message"]
    assert plan_deletion(going(volume=volume)).delete == (volume,)
    assert plan_deletion(going()).release is Policy.DELETE
    last = plan_deletion(going(released="removed"))
    assert last.finish
    assert last.events[0].message == "removed"


@promise("S-132")
@pytest.mark.parametrize("spec", [SPEC, S3_DELETE])
def test_pods_that_name_it_inline_are_waited_for(spec: dict[str, Any]) -> None:
    """Their nodes ask for the volume with every look at them, and their work is in the data."""
    volume = volume_of(wanted(spec))
    asked = plan_deletion(going(spec, volume=volume, pods=None))
    assert (asked.list_pods, asked.delete, asked.release) == (True, (), None)
    named = plan_deletion(going(spec, volume=volume, pods=("train (inline)",)))
    assert "in use by: train (inline)" in named.status["conditions"][0]["message"]
    assert (named.delete, named.release, named.finish) == ((), None, False)
    assert plan_deletion(going(spec, volume=volume)).delete == (volume,)


@promise("S-132")
def test_pods_are_waited_for_before_data_is_removed_even_without_a_volume() -> None:
    assert plan_deletion(going(pods=None)).list_pods
    assert plan_deletion(going(pods=("train (inline)",))).release is None
    assert not plan_deletion(going(SPEC, pods=None)).list_pods, "nothing is removed"


def test_a_deletion_with_retain_needs_no_credentials() -> None:
    assert plan_deletion(going(SPEC)).finish


EXPORT = NFSLocation(server="nas", path="/srv/datastores/team_digits_0b6d/data")


def own_export(policy: str = "Retain", **status: Any) -> tuple[dict[str, Any], EffectiveSpec]:
    noted = {"storageClassName": "nas", "provisionedBy": "NFS host nas, root /srv/datastores"}
    datastore = {**body({"nfs": {}, "reclaimPolicy": policy}), "status": {**noted, **status}}
    return datastore, effective_spec(datastore, nfs_class(), Settings())


@promise("S-280", "S-287")
def test_the_default_class_and_its_host_are_written_down_before_anything_is_made() -> None:
    datastore, what = own_export()
    first = decide(seen({**datastore, "status": {"phase": "Pending"}}, effective=what, facts=None))
    noted = {"storageClassName": "nas", "provisionedBy": "NFS host nas, root /srv/datastores"}
    assert (first.status, first.look, first.apply) == ({"phase": "Pending", **noted}, False, ())
    assert decide(seen(datastore, effective=what, facts=None)).look
    told = decide(seen(datastore, effective=what, facts=Facts(error=errors.Unreachable("x"))))
    assert noted.items() <= told.status.items()


@promise("S-281")
def test_an_export_that_was_made_is_the_source_of_its_volume() -> None:
    """Where it is, is said for people too, also while its host is away."""
    datastore, what = own_export()
    found = Facts(source=EXPORT, owner=Owner.THIS)
    plan = decide(seen(datastore, effective=what, facts=found))
    assert SOURCE in plan.apply[0]["spec"]["csi"]["volumeAttributes"]
    volume = desired.volume(what, "c-1", EXPORT)
    assert volume is not None
    there = {"claim": claim_of(what), "volume": {**volume, "status": {"phase": "Bound"}}}
    told = decide(seen(datastore, effective=what, facts=found, **there))
    assert told.status["location"] == str(EXPORT)
    assert told.status["onDeletion"] == f"{EXPORT} stays, and is not exported any more"
    away = Facts(error=errors.Unreachable("x"))
    later = {**datastore, "status": told.status}
    degraded = decide(seen(later, effective=what, facts=away, **there))
    assert degraded.status["location"] == str(EXPORT)
    assert conditions(degraded)["Degraded"] == ("True", "EndpointUnreachable")
    # A volume without its source would be one for ever: its source never changes.
    assert decide(seen(later, effective=what, facts=away, claim=claim_of(what))).apply == ()


@promise("S-287")
@pytest.mark.parametrize("policy", ["Retain", "Delete", "Archive"])
def test_an_export_is_removed_with_every_reclaim_policy(policy: str) -> None:
    datastore, what = own_export(policy, volumeName="datastore-0b6d")
    state = replace(going(effective=what), datastore={**datastore, "metadata": body()["metadata"]})
    assert plan_deletion(state).release is Policy(policy)
    assert plan_deletion(replace(state, pods=("train",))).release is None, "in use"
    assert not plan_deletion(replace(state, failure=errors.Unreachable("x"))).finish, "it may still be exported"


def without_class(
    spec: dict[str, Any], storage_class: dict[str, Any], owner: Owner = Owner.THIS
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The status of a Datastore that worked, and the one after its StorageClass was deleted. owner: of its data."""
    what = effective_spec(body(spec), storage_class, Settings())
    datastore = {**body(spec), "status": {"provisionedBy": what.provisioned_by, "storageClassName": what.class_name}}
    there = {"claim": claim_of(what), "volume": {**volume_of(what), "status": {"phase": "Bound"}}}
    before = decide(seen(datastore, effective=what, facts=replace(WORKS, owner=owner), **there)).status
    gone = Facts(error=Mistake("StorageClassNotFound", "there is no StorageClass c", permanent=True))
    return before, decide(seen({**datastore, "status": before}, effective=None, facts=gone, **there)).status


S3_CLASS = {"metadata": {"name": "c"}, "provisioner": DRIVER, "parameters": SHARED | {"create": "true"}}


@promise("S-78")
def test_what_is_known_of_the_data_stays_when_the_class_is_gone() -> None:
    """Nodes mount the data by it, a person finds it by it, and the deletion needs it."""
    before, after = without_class({"storageClassName": "c", "readOnly": True}, S3_CLASS)
    changed = {"phase", "conditions"}
    assert {name for name in before | after if before.get(name) != after.get(name)} == changed
    assert before["mount"]["spec"]["readOnly"] is True
    assert before["location"] == "s3://shared/team/digits/"


@promise("S-78", "S-287", "S-297")
@pytest.mark.parametrize(
    ("spec", "storage_class", "owner", "waits"),
    [
        ({"nfs": {}}, nfs_class(), Owner.THIS, True),
        ({"storageClassName": "nas"}, nfs_class(), Owner.THIS, True),
        ({"storageClassName": "c", "reclaimPolicy": "Delete"}, S3_CLASS, Owner.THIS, True),
        ({"storageClassName": "c", "reclaimPolicy": "Archive"}, S3_CLASS, Owner.THIS, True),
        ({"storageClassName": "c", "reclaimPolicy": "Delete"}, S3_CLASS, Owner.NOBODY, False),
        ({"storageClassName": "c", "reclaimPolicy": "Archive"}, S3_CLASS, Owner.OTHER, False),
        ({"storageClassName": "c"}, S3_CLASS, Owner.THIS, False),
    ],
)
def test_what_was_made_for_a_datastore_waits_for_its_class(
    spec: dict[str, Any], storage_class: dict[str, Any], owner: Owner, waits: bool
) -> None:
    """Without the class nobody knows where it is: an export would be served, and data be left, for good."""
    _, status = without_class(spec, storage_class, owner)
    gone = Mistake("StorageClassNotFound", "there is no StorageClass c", permanent=True)
    state = replace(going(effective=None, failure=gone), datastore={**body(spec), "status": status})
    plan = plan_deletion(state)
    assert (plan.finish, plan.release) == (not waits, None)
    if waits:
        assert plan.status["conditions"][0]["reason"] == "StorageClassNotFound"
        assert "remove-finalizer" in plan.status["conditions"][0]["message"]
    assert plan_deletion(replace(state, abandoned=True)).finish, "its namespace goes"


@promise("S-73")
def test_what_a_deletion_would_do_is_said_in_an_outage_too() -> None:
    spec = {"s3": {"bucket": "digits", "credentialsSecret": "keys", "create": True}, "reclaimPolicy": "Delete"}
    datastore = body(spec)
    for facts in (replace(WORKS, owner=Owner.THIS), Facts(error=errors.Unreachable("x"))):
        what = wanted(spec)
        there = {"claim": claim_of(what), "volume": {**volume_of(what), "status": {"phase": "Bound"}}}
        status = decide(seen(datastore, effective=what, facts=facts, **there)).status
        assert status["owned"] is True
        assert status["onDeletion"] == "all of s3://digits/ is removed (Delete)"
        datastore = {**datastore, "status": status}


def test_a_failing_removal_is_told_and_tried_again_until_the_namespace_goes() -> None:
    failure = errors.AccessDenied("not allowed")
    step = plan_deletion(going(failure=failure))
    assert not step.finish
    assert step.release is Policy.DELETE
    assert "kubectl datastore remove-finalizer digits" in step.status["conditions"][0]["message"]
    left = plan_deletion(going(failure=failure, abandoned=True))
    assert left.finish
    assert left.events[0].reason == "DataLeft"


def test_a_datastore_that_never_worked_is_released_at_once() -> None:
    never = going(failure=errors.Unreachable("x"))
    assert plan_deletion(replace(never, datastore={**never.datastore, "status": {}})).finish


def test_a_deleted_datastore_with_an_invalid_spec_is_released() -> None:
    assert plan_deletion(going(effective=None)).finish


def test_a_kept_claim_of_another_driver_stays() -> None:
    kept = {"claim": {"storageClassName": "ebs"}}
    assert plan_deletion(going(kept, claim=claim_of(wanted(kept)))).delete == ()
    removed = {**kept, "reclaimPolicy": "Delete"}
    claim = claim_of(wanted(removed))
    assert plan_deletion(going(removed, claim=claim)).delete == (claim,)


def test_without_our_finalizer_nothing_is_done() -> None:
    assert plan_deletion(replace(going(), datastore=body(finalizers=["other"]))).finish is False


def test_a_volume_without_its_datastore_is_an_orphan() -> None:
    volume = volume_of(wanted())
    assert orphans(volume, None)
    assert not orphans(volume, body())
    assert orphans(volume, body(uid="another"))
    assert not orphans({"metadata": {"name": "x", "labels": {}}}, None)


# -- conditions and reasons


def test_transition_times_move_only_with_the_status() -> None:
    before = [{"type": "Ready", "status": "True", "reason": "Ready", "lastTransitionTime": EARLIER}]
    same = merged(before, [Finding(type="Ready", status="True", reason="Other")], 1, NOW)
    other = merged(before, [Finding(type="Ready", status="False", reason="Other")], 1, NOW)
    assert (same[0]["lastTransitionTime"], other[0]["lastTransitionTime"]) == (EARLIER, NOW)


def test_each_transition_makes_one_event() -> None:
    before = [{"type": "Ready", "status": "False", "reason": "A"}]
    assert transitions(before, [Finding(type="Ready", status="False", reason="A", message="m")]) == []
    assert [each.reason for each in transitions(before, [Finding(type="Ready", status="False", reason="B")])] == ["B"]
    assert not transitions(before, [Finding(type="Ready", status="True", reason="Ready")])[0].warning


def _subclasses(kind: type[errors.DatastoreError]) -> list[type[errors.DatastoreError]]:
    return [kind, *(below for each in kind.__subclasses__() for below in _subclasses(each))]


def test_every_error_has_a_reason() -> None:
    for kind in _subclasses(errors.DatastoreError):
        if kind.__module__ == "datastore.errors":
            assert reason_of(kind("x")) in REASONS.values(), kind


def test_a_message_is_one_short_line_without_what_changes_each_time() -> None:
    text = message_of(errors.AccessDenied("no\nway (request 4F5) \x00 secret_key=CANARY " + "x" * 2000))
    assert text.startswith("no way ")
    assert "CANARY" not in text
    assert "4F5" not in text
    assert len(text.encode()) <= 1024


@promise("S-301")
def test_a_managed_nfs_server_counts_as_down_at_the_third_failed_probe() -> None:
    good, late, busy = (
        Facts(),
        Facts(error=errors.DeadlineExceeded("within 10 s")),
        Facts(error=errors.Throttled("busy")),
    )
    starting, refused = Facts(error=errors.ServerStarting("not ready yet")), Facts(error=errors.AccessDenied("no"))
    assert [believed(good, late, failures, exported=True) for failures in range(3)] == [good, good, late]
    assert all(believed(good, each, 0, exported=True) is good for each in (busy, starting))
    for before, found, exported in ((good, refused, True), (good, late, False), (None, late, True), (late, good, True)):
        assert believed(before, found, 0, exported=exported) is found
