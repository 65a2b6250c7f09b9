"""datastore.controller.servings: what a Serving makes, and what it tells; without a cluster."""

from __future__ import annotations

import json
from typing import Any

import pytest

from datastore.api.model import ServingStatus
from datastore.controller.runtime.ownimage import Image
from datastore.controller.servings.decide import Observed, Plan, decide
from tests.promises import promise

NOW = "2026-01-31T12:00:00Z"
OURS = Image("registry.example.org/datastore:1", "IfNotPresent")
SPEC: dict[str, Any] = {"model": "digits", "alias": "prod", "replicas": 2, "image": "registry.example.org/digits:1"}
MODEL: dict[str, Any] = {
    "metadata": {"name": "digits", "namespace": "team"},
    "spec": {},
    "status": {"versions": 2, "latestVersion": 2, "aliases": [{"name": "prod", "version": 1}], "store": "models"},
}
STORE: dict[str, Any] = {"metadata": {"name": "models"}, "spec": {}, "status": {"claimName": "models"}}
REFUSED = {"type": "StoreUpdated", "status": "False", "reason": "Refused", "message": "exceeded quota: small"}
DIGESTS = {1: "sha256:" + "1" * 64, 2: "sha256:" + "2" * 64}


def serving(spec: dict[str, Any] | None = None, **status: Any) -> dict[str, Any]:
    return {
        "apiVersion": "datastore.dev/v1alpha1",
        "kind": "Serving",
        "metadata": {"name": "digits", "namespace": "team", "uid": "u-1", "generation": 4},
        "spec": SPEC if spec is None else spec,
        "status": status,
    }


def aliased(version: int) -> dict[str, Any]:
    return {**MODEL, "status": {**MODEL["status"], "aliases": [{"name": "prod", "version": version}]}}


def seen(spec: dict[str, Any] | None = None, **more: Any) -> Observed:
    rest = {"model": MODEL, "store": STORE, "deployment": None, "service": None, "autoscaler": None, "pods": ()}
    return Observed(**{"serving": serving(spec), "image": OURS, "now": NOW, **rest, **more})


def made(plan: Plan) -> dict[str, dict[str, Any]]:
    return {each["kind"]: each for each in plan.apply}


def settled(spec: dict[str, Any] | None = None, **more: Any) -> Observed:
    """As it is when everything that was asked for is there."""
    there = made(decide(seen(spec, **{key: more[key] for key in ("model",) if key in more})))
    deployment = there["Deployment"]
    count = deployment["spec"]["replicas"]
    deployment["metadata"]["generation"] = 7
    deployment["status"] = {"observedGeneration": 7, "replicas": count, "updatedReplicas": count}
    number = int(deployment["spec"]["template"]["metadata"]["labels"]["datastore.dev/version"])
    found = {
        "deployment": deployment,
        "service": there["Service"],
        "autoscaler": there.get("HorizontalPodAutoscaler"),
        "pods": [pod(f"p-{index}", number) for index in range(count)],
    }
    return seen(spec, **found | more)


def pod(name: str, version: int, *, ready: bool = True, code: int | None = 0, text: str = "") -> dict[str, Any]:
    """A pod of the Serving. code: with which its verification ended, and text what it reported."""
    report = text or json.dumps({"version": version, "digest": DIGESTS[version]})
    ended = {"terminated": {"exitCode": code, "message": report}} if code is not None else {"running": {}}
    return {
        "metadata": {"name": name, "namespace": "team", "labels": {"datastore.dev/version": str(version)}},
        "status": {
            "phase": "Running",
            "initContainerStatuses": [{"name": "verify", "state": ended}],
            "conditions": [{"type": "Ready", "status": str(ready)}],
        },
    }


def conditions(plan: Plan) -> dict[str, tuple[str, str]]:
    ServingStatus.model_validate(plan.status)
    return {each["type"]: (each["status"], each["reason"]) for each in plan.status["conditions"]}


@promise("S-410")
def test_a_serving_makes_a_deployment_and_a_service_and_the_version_is_mounted_read_only() -> None:
    objects = made(decide(seen()))
    assert set(objects) == {"Deployment", "Service"}
    spec = objects["Deployment"]["spec"]
    assert (spec["replicas"], spec["strategy"]["rollingUpdate"]["maxUnavailable"]) == (2, 0)
    inner = spec["template"]["spec"]
    assert inner["volumes"] == [{"name": "store", "persistentVolumeClaim": {"claimName": "models", "readOnly": True}}]
    (verify,), (serve,) = inner["initContainers"], inner["containers"]
    assert verify["image"] == OURS.name
    assert verify["args"][-1] == "digits:1"
    (shown,) = serve["volumeMounts"]
    assert shown == {"name": "store", "mountPath": "/models/model/1", "subPath": "digits/1", "readOnly": True}
    assert serve["readinessProbe"]["grpc"] == {"port": 8500, "service": ""}
    (port,) = objects["Service"]["spec"]["ports"]
    assert (port["port"], objects["Service"]["spec"]["selector"]) == (8500, {"datastore.dev/serving": "digits"})
    for each in objects.values():
        assert [owner["uid"] for owner in each["metadata"]["ownerReferences"]] == ["u-1"]


@promise("S-410")
def test_an_image_that_speaks_http_is_asked_by_http() -> None:
    spec = {**SPEC, "protocol": "http", "port": 9000, "healthPath": "/ready", "env": [{"name": "A", "value": "b"}]}
    (serve,) = made(decide(seen(spec)))["Deployment"]["spec"]["template"]["spec"]["containers"]
    assert serve["readinessProbe"]["httpGet"] == {"path": "/ready", "port": 9000}
    variables = {each["name"]: each["value"] for each in serve["env"]}
    assert variables["DATASTORE_PORT"] == "9000"
    assert variables["A"] == "b"


@promise("S-410")
@pytest.mark.parametrize(
    "image", ["", "docker.io/tensorflow/serving:2.19.1", "r.example.org:5000/tensorflow/serving@sha256:0"]
)
def test_tensorflow_serving_finds_the_version_and_answers_health_checks(image: str) -> None:
    """Also where no image is named. Its entry point serves the numbers below /models/model, at 8500 and 8501."""
    plain = {"model": "digits", "version": 2, **({"image": image} if image else {})}
    objects = made(decide(seen(plain)))
    (serve,) = objects["Deployment"]["spec"]["template"]["spec"]["containers"]
    assert serve["image"].partition("@")[0].rpartition("tensorflow/serving")[1] == "tensorflow/serving"
    assert serve["args"] == ["--enable_grpc_healthcheck_service=true"]
    assert "command" not in serve
    (mount,) = serve["volumeMounts"]
    base, _, number = mount["mountPath"].rpartition("/")
    assert (base, number.isdigit(), mount["subPath"], mount["readOnly"]) == ("/models/model", True, "digits/2", True)
    assert [each["containerPort"] for each in serve["ports"]] == [8500]
    assert serve["readinessProbe"]["grpc"]["port"] == 8500
    assert [each["port"] for each in objects["Service"]["spec"]["ports"]] == [8500]
    over_http = made(decide(seen({**plain, "protocol": "http"})))
    (serve,) = over_http["Deployment"]["spec"]["template"]["spec"]["containers"]
    assert serve["readinessProbe"]["httpGet"] == {"path": "/v1/models/model", "port": 8501}
    assert [each["port"] for each in over_http["Service"]["spec"]["ports"]] == [8501]


@promise("S-410")
def test_an_autoscaler_sets_the_number_of_pods_until_it_is_no_longer_requested() -> None:
    plain = {name: value for name, value in SPEC.items() if name != "replicas"}
    scaled = {**plain, "autoscaling": {"minReplicas": 2, "maxReplicas": 5}, "resources": {"requests": {"cpu": "500m"}}}
    first = made(decide(seen(scaled)))
    assert first["Deployment"]["spec"]["replicas"] == 2
    bounds = first["HorizontalPodAutoscaler"]["spec"]
    assert (bounds["minReplicas"], bounds["maxReplicas"], bounds["scaleTargetRef"]["name"]) == (2, 5, "digits")
    there = settled(scaled)
    assert there.deployment is not None
    grown = {**there.deployment, "spec": {**there.deployment["spec"], "replicas": 4}}
    assert "Deployment" not in made(decide(settled(scaled, deployment=grown)))
    over = {**there.deployment, "spec": {**there.deployment["spec"], "replicas": 9}}
    assert made(decide(settled(scaled, deployment=over)))["Deployment"]["spec"]["replicas"] == 5
    gone = decide(settled(SPEC, autoscaler=there.autoscaler))
    assert [each["kind"] for each in gone.delete] == ["HorizontalPodAutoscaler"]
    refused = decide(seen({**plain, "autoscaling": {"maxReplicas": 5}}))
    assert conditions(refused)["Ready"] == ("False", "InvalidSpec")
    assert "resources.requests.cpu" in refused.status["message"]


@promise("S-410")
def test_objects_as_wanted_are_not_changed_and_edits_by_hand_are_undone() -> None:
    plan = decide(settled())
    assert plan.apply == plan.delete == ()
    assert conditions(plan) == {
        "Ready": ("True", "Serving"),
        "Progressing": ("False", "Complete"),
        "Degraded": ("False", "AsWanted"),
    }
    assert (plan.status["phase"], plan.status["endpoint"]) == ("Ready", "digits.team.svc:8500")
    there = settled()
    assert there.deployment is not None
    there.deployment["spec"]["template"]["spec"]["containers"][0]["image"] = "other"
    assert set(made(decide(there))) == {"Deployment"}
    fewer = {**SPEC, "env": [{"name": "A", "value": "b"}]}
    assert set(made(decide(seen(SPEC, **_objects(settled(fewer)))))) == {"Deployment"}, "a variable that is no more"


def _objects(there: Observed) -> dict[str, Any]:
    return {"deployment": there.deployment, "service": there.service, "pods": there.pods}


@promise("S-410")
def test_an_object_of_another_owner_with_the_name_is_not_changed() -> None:
    other = {"kind": "Service", "metadata": {"name": "digits", "namespace": "team"}, "spec": {}}
    plan = decide(seen(service=other))
    assert plan.apply == ()
    assert conditions(plan)["Ready"] == ("False", "NameTaken")
    assert "Service digits exists and was not made for this Serving" in plan.status["message"]


@promise("S-411")
def test_a_damaged_version_is_reported_with_both_digests_and_the_old_one_keeps_serving() -> None:
    text = "digits/2/weights: was saved with sha256 aa, and has bb now"
    old, new = pod("old", 1), pod("new", 2, ready=False, code=3, text=text)
    plan = decide(settled(model=aliased(2), pods=[old, new]))
    assert conditions(plan)["Ready"] == ("True", "Serving")
    assert conditions(plan)["Degraded"] == ("True", "VersionDamaged")
    assert plan.status["phase"] == "Degraded"
    assert text in plan.status["message"]
    alone = decide(settled(model=aliased(2), pods=[new]))
    assert conditions(alone)["Ready"] == ("False", "VersionDamaged")
    assert alone.status["phase"] == "Failed"
    assert next(each.reason for each in alone.events if each.warning) == "VersionDamaged"


@promise("S-411")
def test_a_rollout_warns_only_of_pods_that_stopped_answering() -> None:
    pods = [pod("p-0", 1, ready=False), pod("p-1", 1, ready=False)]
    starting = decide(settled(pods=pods))
    done = decide(settled(serving=serving(**starting.status)))
    assert {each.reason for each in done.events} == {"Serving", "Complete"}
    assert not [each for each in (*starting.events, *done.events) if each.warning]
    silent = decide(settled(serving=serving(**done.status), pods=pods))
    assert [each.message for each in silent.events if each.warning] == [
        "Ready is False: version 1 is being rolled out: 0 of 2 pods answer"
    ]


@promise("S-412")
def test_moving_an_alias_replaces_the_pods_and_moving_it_back_restores_them() -> None:
    before = settled()
    assert before.deployment is not None
    rolled = made(decide(seen(model=aliased(2), **_objects(before))))["Deployment"]
    inner = rolled["spec"]["template"]
    assert inner["metadata"]["labels"]["datastore.dev/version"] == "2"
    assert inner["spec"]["containers"][0]["volumeMounts"][0]["subPath"] == "digits/2"
    assert inner["spec"]["containers"][0]["lifecycle"]["preStop"] == {"sleep": {"seconds": 15}}
    back = made(decide(seen(deployment={**rolled, "status": {}}, service=before.service)))["Deployment"]
    assert back["spec"] == before.deployment["spec"]


@promise("S-413")
def test_the_status_says_what_each_pod_really_serves() -> None:
    pods = [pod("b", 2), pod("a", 1), pod("c", 2, ready=False, code=None)]
    plan = decide(settled(model=aliased(2), pods=pods))
    assert plan.status["pods"] == [
        {"name": "a", "version": 1, "digest": DIGESTS[1], "ready": True},
        {"name": "b", "version": 2, "digest": DIGESTS[2], "ready": True},
        {"name": "c", "version": 2, "ready": False},
    ]
    assert (plan.status["version"], plan.status["digest"]) == (2, DIGESTS[2])
    assert (plan.status["phase"], plan.status["readyReplicas"]) == ("Rolling", 2)
    assert conditions(plan)["Progressing"] == ("True", "Rolling")


@promise("S-414")
@pytest.mark.parametrize(
    ("template", "word"),
    [
        ({"serviceAccountName": "admin"}, "serviceAccountName"),
        ({"hostNetwork": True}, "hostNetwork"),
        ({"securityContext": {"runAsUser": 1, "privileged": True}}, "securityContext.privileged"),
        ({"securityContext": {"capabilities": {"add": ["NET_ADMIN"]}}}, "securityContext.capabilities"),
        ({"volumes": [{"name": "a", "hostPath": {"path": "/"}}]}, "hostPath"),
    ],
)
def test_a_template_that_would_give_pods_more_rights_is_refused(template: dict[str, Any], word: str) -> None:
    plan = decide(seen({**SPEC, "template": template}))
    assert plan.apply == ()
    assert conditions(plan)["Degraded"] == ("True", "TemplateRefused")
    assert word in plan.status["message"]


@promise("S-414")
def test_a_template_may_take_rights_away() -> None:
    """As Pod Security's level restricted asks for; otherwise no Serving could be in such a namespace."""
    context = {"runAsNonRoot": True, "runAsUser": 1000, "capabilities": {"drop": ["ALL"]}}
    template = {"securityContext": {**context, "allowPrivilegeEscalation": None, "fsGroup": 2000}}
    pod = made(decide(seen({**SPEC, "template": template})))["Deployment"]["spec"]["template"]["spec"]
    assert pod["securityContext"] == {"fsGroup": 2000}
    assert pod["containers"][0]["securityContext"] == {**context, "allowPrivilegeEscalation": False}


@promise("S-414")
def test_the_pods_have_no_token_and_the_rest_of_the_template() -> None:
    template = {"labels": {"team": "a"}, "nodeSelector": {"gpu": "yes"}, "imagePullPolicy": "Never"}
    body = made(decide(seen({**SPEC, "template": template})))["Deployment"]["spec"]["template"]
    assert body["metadata"]["labels"]["team"] == "a"
    assert (body["spec"]["nodeSelector"], body["spec"]["automountServiceAccountToken"]) == ({"gpu": "yes"}, False)
    assert body["spec"]["containers"][0]["imagePullPolicy"] == "Never"


@promise("S-416")
@pytest.mark.parametrize(
    ("spec", "more", "reason", "words"),
    [
        ({}, {"model": None}, "ModelNotFound", "no Model digits"),
        ({}, {"model": {**MODEL, "status": {}}}, "WaitingForModel", "no Job has looked into its store"),
        ({}, {"model": {**MODEL, "status": {"conditions": [REFUSED]}}}, "WaitingForModel", "exceeded quota"),
        ({"alias": "canary"}, {}, "AliasNotFound", "no alias canary; it has prod"),
        ({"alias": None, "version": 3}, {}, "VersionNotFound", "no version 3 yet"),
        ({}, {"store": None}, "StoreNotFound", "no Datastore models"),
        ({}, {"store": {"metadata": {"name": "models"}}}, "WaitingForStore", "can't be mounted yet"),
    ],
)
def test_running_pods_keep_serving_while_the_wanted_version_is_unknown(
    spec: dict[str, Any], more: dict[str, Any], reason: str, words: str
) -> None:
    wanted = {name: value for name, value in {**SPEC, **spec}.items() if value is not None}
    plan = decide(seen(wanted, **_objects(settled()), **more))
    assert plan.apply == plan.delete == ()
    assert conditions(plan)["Ready"] == ("True", "Serving")
    assert conditions(plan)["Degraded"] == ("True", reason)
    assert words in plan.status["message"]
    assert conditions(decide(seen(wanted, **more)))["Ready"] == ("False", reason)


def test_the_status_says_why_a_pod_does_not_answer() -> None:
    stuck = pod("a", 1, ready=False)
    waiting = {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}
    stuck["status"]["containerStatuses"] = [{"name": "serve", "state": waiting}]
    plan = decide(settled(pods=[stuck, pod("b", 1)]))
    assert conditions(plan)["Degraded"] == ("True", "ImagePullBackOff")
    assert "pod a: no such image" in plan.status["message"]
