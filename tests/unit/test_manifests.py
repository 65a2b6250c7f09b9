"""manifests/: the chart is the base, and what they say of each other holds."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.metrics import MetricWrapperBase

from datastore.api.endpoints import ENVIRONMENT, EndpointPolicy
from datastore.api.names import CREDENTIALS, GROUP
from datastore.api.volumecontext import DRIVER
from datastore.controller.__main__ import _arguments, _settings
from datastore.controller.datastores import claimprobe
from datastore.controller.datastores import metrics as of_datastores
from datastore.controller.runtime import metrics
from datastore.controller.servings import metrics as of_servings
from datastore.controller.trainingjobs import __main__ as training
from datastore.controller.trainingjobs import metrics as of_trainingjobs
from datastore.csi import metrics as of_volumes
from datastore.csi.mountdaemon import metrics as of_mounts
from datastore.csi.mountdaemon.cgroups import limit_of
from datastore.csi.settings import from_environment
from datastore.manifests import chartwriter
from datastore.units import parse_quantity
from tests.promises import promise

MANIFESTS = Path(__file__).resolve().parents[2] / "manifests"
BASE = [document for _, document in chartwriter.objects()]
CHART = MANIFESTS / "chart"


def of(kind: str, name: str) -> Any:
    return next(each for each in BASE if (each["kind"], each["metadata"]["name"]) == (kind, name))


def test_the_checked_in_chart_is_what_the_base_says() -> None:
    for name, text in chartwriter.files().items():
        assert (CHART / name).read_text() == text, "run: python -m datastore.manifests.chartwriter"
    there = {str(path.relative_to(CHART)) for path in CHART.rglob("*.*")} - {"Chart.yaml"}
    assert there == set(chartwriter.files())


def test_the_nodes_parts_work_in_the_directory_that_the_kubelet_has() -> None:
    pods = [each["spec"]["template"]["spec"] for each in _chart(kubeletDir="/k") if each["kind"] == "DaemonSet"]
    assert len(pods) == 2
    assert "/var/lib/kubelet" not in json.dumps(pods)
    for pod in pods:
        (container,) = pod["containers"]
        settings = from_environment({each["name"]: each.get("value", "") for each in container["env"]})
        assert str(settings.csi_socket) == "/k/plugins/csi.datastore.dev/csi.sock"
        assert "/k" in [each["mountPath"] for each in container["volumeMounts"]]
        assert "/k" in [each["hostPath"]["path"] for each in pod["volumes"]]


def test_values_yaml_says_what_each_of_its_values_is() -> None:
    lines = (CHART / "values.yaml").read_text().splitlines()
    assert [after for before, after in pairwise(lines) if after[0] not in " #" and not before.startswith("# ")] == []


def test_the_chart_with_its_defaults_makes_the_objects_of_the_base() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    made = [yaml.safe_load(path.read_text()) for path in (CHART / "crds").iterdir()]
    for path in (CHART / "templates").iterdir():
        made += chartwriter.rendered(path.read_text(), values, chartwriter.NAMESPACE)
    expected = [each for each in BASE if each["kind"] != "Namespace"]

    def place(each: Any) -> tuple[str, str]:
        return each["kind"], each["metadata"]["name"]

    assert sorted(made, key=place) == sorted(expected, key=place)


def test_the_charts_values_reach_the_objects() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    values["image"] = {"repository": "r", "tag": "t", "pullPolicy": "Always", "pullSecrets": [{"name": "s"}]}
    values["node"]["tolerations"] = []
    values["node"]["maxVolumes"] = 5
    values["podMonitor"]["enabled"] = True
    (daemon,) = chartwriter.rendered((CHART / "templates" / "node.yaml").read_text(), values, "other")
    pod = daemon["spec"]["template"]["spec"]
    assert (pod["containers"][0]["image"], pod["tolerations"], daemon["metadata"]["namespace"]) == ("r:t", [], "other")
    assert pod["imagePullSecrets"] == [{"name": "s"}]
    told = {each["name"]: each.get("value") for each in pod["containers"][0]["env"]}
    assert told["MAX_VOLUMES"] == "5", "a variable is text, also where a person wrote a number"
    monitor, alerts = chartwriter.rendered((CHART / "templates" / "monitoring.yaml").read_text(), values, "other")
    assert monitor["spec"]["namespaceSelector"] == {"matchNames": ["other"]}
    assert alerts["metadata"]["namespace"] == "other"


def _chart(**chosen: Any) -> list[Any]:
    """What helm makes of the templates with these values."""
    values = yaml.safe_load((CHART / "values.yaml").read_text()) | chosen
    paths = sorted((CHART / "templates").iterdir())
    return [each for path in paths for each in chartwriter.rendered(path.read_text(), values, "ours")]


def _names(made: list[Any], kind: str) -> set[tuple[str, str]]:
    return {(each["metadata"].get("namespace", ""), each["metadata"]["name"]) for each in made if each["kind"] == kind}


def _deployment(made: list[Any], name: str) -> Any:
    (spec,) = [each["spec"] for each in made if (each["kind"], each["metadata"]["name"]) == ("Deployment", name)]
    return spec


def _environment(made: list[Any], name: str = "datastore-controller") -> dict[str, str]:
    pod = _deployment(made, name)["template"]["spec"]
    return {each["name"]: each.get("value", "") for each in pod["containers"][0]["env"]}


@promise("S-113")
def test_the_charts_switch_takes_the_rotation_away_whole() -> None:
    made = _chart(rotation={"enabled": False})
    assert _environment(made)["WATCH_SECRETS"] == "false"
    left = {each["metadata"]["name"] for each in made if "Admission" in each["kind"]}
    assert left == {"datastore-node", "datastore-node-usage"}
    assert not [each for each in made if "rotation" in each["metadata"]["name"]]
    assert _environment(_chart())["WATCH_SECRETS"] == "true"


@promise("S-114", "S-418")
@pytest.mark.parametrize(("rotation", "models"), [(True, False), (False, True)])
def test_the_chart_binds_the_controllers_to_their_namespaces(rotation: bool, models: bool) -> None:
    given = yaml.safe_load((CHART / "values.yaml").read_text())["models"] | {"enabled": models}
    made = _chart(namespaces=["a", "b"], rotation={"enabled": rotation}, models=given)
    assert _environment(made)["NAMESPACES"] == "a,b"
    assert _environment(made, "datastore-training-controller")["NAMESPACES"] == "a,b"
    whole = {"datastore-controller-cluster", "datastore-training-controller-cluster", "datastore-node"}
    whole |= {"datastore-models-cluster", "datastore-training-models"} if models else set()
    assert _names(made, "ClusterRoleBinding") == {("", each) for each in whole}
    roles = ["datastore-controller", "datastore-training-controller"]
    if models:
        roles += ["datastore-models", "datastore-servings"]
        assert {_environment(made, role)["NAMESPACES"] for role in roles} == {"a,b"}
    served = {(each, f"{role}-served") for each in ("a", "b", "ours") for role in roles}
    rotated = {(each, "datastore-controller-rotation") for each in ("a", "b", "ours") if rotation}
    assert _names(made, "RoleBinding") == served | rotated | {("ours", each) for each in [*roles, "datastore-node"]}
    subjects = {each["namespace"] for each in made if each["kind"] == "RoleBinding" for each in each["subjects"]}
    assert subjects == {"ours"}


@promise("S-134")
def test_the_charts_controllers_of_some_namespaces_have_replicas_too() -> None:
    replicated = yaml.safe_load((CHART / "values.yaml").read_text())["controller"] | {"replicas": 2}
    made = _chart(namespaces=["a"], controller=replicated)
    deployment = _deployment(made, "datastore-controller")
    assert (deployment["replicas"], deployment["strategy"]) == (2, {"type": "RollingUpdate"})


@promise("S-246")
def test_a_drain_leaves_a_replica_of_each_controller() -> None:
    """On different nodes if possible. One budget holds for a pod: an eviction is refused where there are two. Another
    controller that fails stops no drain."""
    made = _chart(models=yaml.safe_load((CHART / "values.yaml").read_text())["models"] | {"enabled": True})
    controllers = [each for each in made if each["kind"] == "Deployment"]
    budgets = [each["spec"] for each in made if each["kind"] == "PodDisruptionBudget"]
    assert len(controllers) == len(budgets) == 4
    for each in controllers:
        labels = each["spec"]["template"]["metadata"]["labels"]
        (budget,) = [one for one in budgets if one["selector"]["matchLabels"].items() <= labels.items()]
        assert (budget["maxUnavailable"], budget["unhealthyPodEvictionPolicy"]) == (1, "AlwaysAllow")
        (spread,) = each["spec"]["template"]["spec"]["topologySpreadConstraints"]
        assert spread["labelSelector"] == {"matchLabels": labels}


@promise("S-133")
def test_the_charts_endpoints_bind_the_controller_and_the_nodes() -> None:
    ranges = {"allowRanges": ["10.1.0.0/16", "10.2.3.4"], "denyRanges": ["10.96.0.0/12"]}
    made = _chart(endpoints=["https://*.example.org", "http://minio.store:9000"], **ranges)
    (node,) = [each for each in made if each["metadata"]["name"] == "datastore-node" and each["kind"] == "DaemonSet"]
    variables = {
        each["name"]: each.get("value", "") for each in node["spec"]["template"]["spec"]["containers"][0]["env"]
    }
    assert from_environment(variables).policy == EndpointPolicy(
        endpoints=("https://*.example.org", "http://minio.store:9000"),
        allow_ranges=("10.1.0.0/16", "10.2.3.4"),
        deny_ranges=("10.96.0.0/12",),
    )
    same = _environment(made)
    assert all(variables[name] == same[name] for name in ENVIRONMENT)


@promise("S-206", "S-208")
def test_a_node_takes_so_many_volumes_and_has_ceilings_for_caches() -> None:
    node = of("DaemonSet", "datastore-node")["spec"]["template"]["spec"]["containers"][0]
    settings = from_environment({each["name"]: each.get("value", "") for each in node["env"]})
    assert (settings.max_volumes, settings.cache_volume_bytes, settings.cache_node_bytes) == (64, 50 << 30, 100 << 30)
    assert from_environment({}).cache_node_bytes == settings.cache_node_bytes


@promise("S-115")
def test_the_charts_claim_probe_is_the_components() -> None:
    made = _chart(claimProbe={"enabled": True})
    assert _environment(made)["PROBE_CLAIMS"] == "true"
    component = list(yaml.safe_load_all((MANIFESTS / "claim-probe" / "policy.yaml").read_text()))
    names = ("datastore-controller-probe", "datastore-controller-probe-image")
    shipped = [each for each in made if each["metadata"]["name"] in names]
    for each in component + shipped:
        for subject in each.get("subjects", []):
            subject["namespace"] = "any"
        if "paramRef" in each.get("spec", {}):
            each["spec"]["paramRef"]["namespace"] = "any"
    assert shipped == component
    assert not [each for each in _chart() if each["metadata"]["name"] in names]


@promise("S-115")
def test_the_pod_that_tries_a_volume_runs_what_its_policy_says() -> None:
    text = (MANIFESTS / "claim-probe" / "policy.yaml").read_text()
    assert str(list(claimprobe.COMMAND)) in text
    assert f"activeDeadlineSeconds <= {claimprobe.RUN_S}" in text


@promise("S-113")
def test_the_policy_lets_through_the_annotation_that_is_set() -> None:
    variables = of("ValidatingAdmissionPolicy", "datastore-controller-pods")["spec"]["variables"]
    assert {"name": "ours", "expression": f"'{CREDENTIALS}'"} in variables


@pytest.mark.parametrize("name", ["datastore-controller", "datastore-training-controller"])
def test_the_controllers_pod_is_restricted(name: str) -> None:
    pod = of("Deployment", name)["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"]
    context = pod["containers"][0]["securityContext"]
    assert (context["readOnlyRootFilesystem"], context["allowPrivilegeEscalation"]) == (True, False)
    assert context["capabilities"] == {"drop": ["ALL"]}
    assert pod["containers"][0]["resources"]["limits"]["memory"] == "250Mi"


def test_the_controller_takes_the_arguments_it_is_given() -> None:
    container = of("Deployment", "datastore-controller")["spec"]["template"]["spec"]["containers"][0]
    settings = _settings(_arguments().parse_args(container["args"]))
    assert settings.port == container["ports"][0]["containerPort"]


def test_the_controller_of_trainingjobs_takes_the_arguments_it_is_given() -> None:
    container = of("Deployment", training.NAME)["spec"]["template"]["spec"]["containers"][0]
    settings = training.settings_of(training.arguments().parse_args(container["args"]))
    assert settings.port == container["ports"][0]["containerPort"]
    assert settings.overlays == frozenset()


@promise("S-118")
def test_the_memory_of_a_mount_is_counted_in_the_request_of_the_pod_that_it_runs_in() -> None:
    (node,) = of("DaemonSet", "datastore-node")["spec"]["template"]["spec"]["containers"]
    (daemon,) = of("DaemonSet", "datastore-mount-daemon")["spec"]["template"]["spec"]["containers"]
    (memory,) = [each["value"] for each in node["env"] if each["name"] == "MOUNT_MEMORY"]
    one_mount = limit_of(from_environment({"MOUNT_MEMORY": memory}).memory_bytes)
    assert parse_quantity(daemon["resources"]["requests"]["memory"]) >= one_mount + (64 << 20)
    assert "limits" not in daemon["resources"], "it would end other mounts than the one that grows"


def test_only_pods_that_mount_are_privileged() -> None:
    privileged = {
        document["metadata"]["name"]
        for document in BASE
        if "template" in document.get("spec", {})
        for container in document["spec"]["template"]["spec"]["containers"]
        if container["securityContext"].get("privileged")
    }
    assert privileged == {"datastore-node", "datastore-mount-daemon"}


@promise("S-211")
def test_the_pod_of_the_mount_servers_has_no_token() -> None:
    (daemon,) = (each for each in BASE if each["metadata"]["name"] == "datastore-mount-daemon" and "spec" in each)
    assert daemon["spec"]["template"]["spec"]["automountServiceAccountToken"] is False


@promise("S-422")
def test_people_read_all_our_kinds_by_view_and_write_them_by_edit_but_no_status() -> None:
    defined = [each["spec"] for each in BASE if each["kind"] == "CustomResourceDefinition"]
    kinds = {each["names"]["plural"] for each in defined}
    scaled = {each["names"]["plural"] for each in defined if "scale" in each["versions"][0]["subresources"]}
    api = "rbac.authorization.k8s.io/aggregate-to-"
    for name, wanted, of_others in (
        ("datastore-view", {"get", "list", "watch"}, {"view", "edit", "admin"}),
        ("datastore-edit", {"create", "update", "patch", "delete"}, {"edit", "admin"}),
    ):
        role = of("ClusterRole", name)
        given = {(resource, verb) for rule in role["rules"] for resource in rule["resources"] for verb in rule["verbs"]}
        below = {(resource, verb) for resource, verb in given if "/" in resource}
        assert given - below == {(kind, verb) for kind in kinds for verb in wanted}
        of_status = {(f"{kind}/status", "get") for kind in kinds} if name == "datastore-view" else set()
        may_scale = {"get"} if name == "datastore-view" else {"update", "patch"}
        assert below == of_status | {(f"{kind}/scale", verb) for kind in scaled for verb in may_scale}
        assert {group for rule in role["rules"] for group in rule["apiGroups"]} == {GROUP}
        assert {label for label in role["metadata"]["labels"] if label.startswith(api)} == {
            api + to for to in of_others
        }


@promise("S-422")
def test_the_charts_switch_takes_the_roles_of_people_away() -> None:
    left = {name for _, name in _names(_chart(userRoles={"enabled": False}), "ClusterRole")}
    assert {name for _, name in _names(_chart(), "ClusterRole")} - left == {"datastore-view", "datastore-edit"}


def test_no_rule_has_a_wildcard() -> None:
    for document in BASE:
        for rule in document.get("rules", []):
            assert "*" not in [*rule["verbs"], *rule["resources"], *rule["apiGroups"]]


def test_the_csidriver_has_the_name_that_volumes_use() -> None:
    spec = of("CSIDriver", DRIVER)["spec"]
    assert (spec["attachRequired"], spec["podInfoOnMount"], spec["requiresRepublish"]) == (False, True, True)
    assert (spec["fsGroupPolicy"], spec["volumeLifecycleModes"]) == ("File", ["Persistent", "Ephemeral"])


@pytest.mark.parametrize(
    "place",
    [".", "base", "overlays/dev", "overlays/prod", "overlays/namespaced", "monitoring", "replicated", "claim-probe"],
)
def test_every_file_that_a_kustomization_names_exists(place: str) -> None:
    folder = MANIFESTS / place
    document = yaml.safe_load((folder / "kustomization.yaml").read_text())
    for name in document.get("resources", []):
        assert (folder / name).exists(), name


NUMBERS = re.compile(r"\bdatastore_(?:controller|csi|mount|store)_\w+")


def numbers() -> set[str]:
    """Names of all that the controller, the node plugin and the mount daemon tell Prometheus."""
    of_controller = {
        name
        for module in (metrics, of_datastores, of_servings, of_trainingjobs)
        for each in vars(module).values()
        if isinstance(each, MetricWrapperBase)
        for family in each.collect()
        for name in (family.name, f"{family.name}_total", f"{family.name}_bucket")
    }
    return of_controller | {family.name for family in (*of_volumes.FAMILIES, *of_mounts.FAMILIES)}


def test_the_dashboard_asks_for_numbers_that_there_are() -> None:
    """Those of the mounts first: they are what users feel."""
    dashboard = json.loads((MANIFESTS / "monitoring" / "dashboard.json").read_text())
    asked = set(NUMBERS.findall(json.dumps(dashboard)))
    assert asked <= numbers()
    alarming = {"datastore_mount_up", "datastore_mount_unsent_bytes", "datastore_csi_volume_mounted"}
    assert alarming | {"datastore_store_errors_total", "datastore_controller_datastores"} <= asked
    assert "datastore_mount_up" in json.dumps(dashboard["panels"][0])


def test_the_alerts_ask_for_numbers_that_there_are_and_say_where_to_look() -> None:
    (group,) = yaml.safe_load((MANIFESTS / "monitoring" / "alerts.yaml").read_text())["spec"]["groups"]
    for rule in group["rules"]:
        asked = set(NUMBERS.findall(rule["expr"]))
        assert asked, rule["alert"]
        assert asked <= numbers(), rule["alert"]
        assert rule["annotations"].keys() == {"summary", "description"}
        assert rule["labels"]["severity"] in ("critical", "warning")
    controller = of("Deployment", "datastore-controller")["metadata"]["name"]
    assert f'pod=~"{controller}-.*"' in group["rules"][0]["expr"]


@promise("S-246")
def test_a_drain_evicts_each_controller_without_a_flag() -> None:
    """kubectl refuses to evict a pod with an emptyDir, which a controller's temporary files don't need."""
    models = yaml.safe_load((CHART / "values.yaml").read_text())["models"] | {"enabled": True}
    controllers = [each for each in _chart(models=models) if each["kind"] == "Deployment"]
    assert len(controllers) == 4
    for each in controllers:
        pod = each["spec"]["template"]["spec"]
        assert "volumes" not in pod
        environment = {variable["name"]: variable.get("value") for variable in pod["containers"][0]["env"]}
        assert environment["TMPDIR"] == "/dev/shm"


def test_each_panel_of_the_dashboard_has_a_place_of_its_own() -> None:
    panels = json.loads((MANIFESTS / "monitoring" / "dashboard.json").read_text())["panels"]
    assert len({each["id"] for each in panels}) == len(panels)
    assert len({(each["gridPos"]["x"], each["gridPos"]["y"]) for each in panels}) == len(panels)


def test_the_operators_guide_names_numbers_that_there_are() -> None:
    told = set(NUMBERS.findall((MANIFESTS.parent / "docs" / "OPERATIONS.md").read_text()))
    assert told <= numbers()
    assert "datastore_mount_up" in told


def test_prometheus_finds_a_port_of_each_workload() -> None:
    monitor = yaml.safe_load((MANIFESTS / "monitoring" / "podmonitor.yaml").read_text())
    wanted = monitor["spec"]["selector"]["matchLabels"]
    port = monitor["spec"]["podMetricsEndpoints"][0]["port"]
    for workload in (each for each in BASE if each["kind"] in ("Deployment", "DaemonSet")):
        template = workload["spec"]["template"]
        assert wanted.items() <= template["metadata"]["labels"].items()
        assert port in [each["name"] for each in template["spec"]["containers"][0]["ports"]]
