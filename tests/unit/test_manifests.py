"""manifests/: the chart is the base, and what they say of each other holds."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.metrics import MetricWrapperBase

from datastore.api.volumecontext import DRIVER
from datastore.controller import metrics
from datastore.controller.__main__ import _arguments, _settings
from datastore.manifests import chartwriter

MANIFESTS = Path(__file__).resolve().parents[2] / "manifests"
BASE = [document for _, document in chartwriter.objects()]
CHART = MANIFESTS / "chart"


def of(kind: str, name: str) -> Any:
    return next(each for each in BASE if (each["kind"], each["metadata"]["name"]) == (kind, name))


def test_the_checked_in_chart_is_what_the_base_says() -> None:
    for name, text in chartwriter.files().items():
        assert (CHART / name).read_text() == text, "run: python -m datastore.manifests.chartwriter"
    there = {str(path.relative_to(CHART)) for path in CHART.rglob("*.yaml")} - {"Chart.yaml"}
    assert there == set(chartwriter.files())


def test_the_chart_with_its_defaults_makes_the_objects_of_the_base() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    made = [yaml.safe_load(path.read_text()) for path in (CHART / "crds").iterdir()]
    for path in (CHART / "templates").iterdir():
        made += chartwriter.rendered(path.read_text(), values, chartwriter.NAMESPACE)
    expected = [each for _, each in chartwriter.objects() if each["kind"] != "Namespace"]

    def place(each: Any) -> tuple[str, str]:
        return each["kind"], each["metadata"]["name"]

    assert sorted(made, key=place) == sorted(expected, key=place)


def test_the_charts_values_reach_the_objects() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    values["image"] = {"repository": "r", "tag": "t", "pullPolicy": "Always"}
    values["node"]["tolerations"] = []
    values["podMonitor"]["enabled"] = True
    (daemon,) = chartwriter.rendered((CHART / "templates" / "node.yaml").read_text(), values, "other")
    pod = daemon["spec"]["template"]["spec"]
    assert (pod["containers"][0]["image"], pod["tolerations"], daemon["metadata"]["namespace"]) == ("r:t", [], "other")
    (monitor,) = chartwriter.rendered((CHART / "templates" / "podmonitor.yaml").read_text(), values, "other")
    assert monitor["spec"]["namespaceSelector"] == {"matchNames": ["other"]}


def test_the_controllers_pod_is_restricted() -> None:
    pod = of("Deployment", "datastore-controller")["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"]
    context = pod["containers"][0]["securityContext"]
    assert (context["readOnlyRootFilesystem"], context["allowPrivilegeEscalation"]) == (True, False)
    assert context["capabilities"] == {"drop": ["ALL"]}
    assert pod["containers"][0]["resources"]["limits"]["memory"] == "250Mi"


def test_the_controller_takes_the_arguments_it_is_given() -> None:
    container = of("Deployment", "datastore-controller")["spec"]["template"]["spec"]["containers"][0]
    settings = _settings(_arguments().parse_args(container["args"]))
    assert settings.peering == "datastore-controller"
    assert settings.port == container["ports"][0]["containerPort"]


def test_only_who_mounts_is_privileged() -> None:
    privileged = {
        document["metadata"]["name"]
        for document in BASE
        if "template" in document.get("spec", {})
        for container in document["spec"]["template"]["spec"]["containers"]
        if container["securityContext"].get("privileged")
    }
    assert privileged == {"datastore-node", "datastore-keeper"}


def test_no_rule_has_a_wildcard() -> None:
    for document in BASE:
        for rule in document.get("rules", []):
            assert "*" not in [*rule["verbs"], *rule["resources"], *rule["apiGroups"]]


def test_the_driver_is_the_one_of_the_volumes() -> None:
    spec = of("CSIDriver", DRIVER)["spec"]
    assert (spec["attachRequired"], spec["podInfoOnMount"], spec["requiresRepublish"]) == (False, True, True)
    assert (spec["fsGroupPolicy"], spec["volumeLifecycleModes"]) == ("File", ["Persistent", "Ephemeral"])


@pytest.mark.parametrize("place", [".", "base", "overlays/dev", "overlays/prod", "monitoring"])
def test_what_a_kustomization_names_is_there(place: str) -> None:
    folder = MANIFESTS / place
    document = yaml.safe_load((folder / "kustomization.yaml").read_text())
    for name in document["resources"]:
        assert (folder / name).exists(), name


def test_the_dashboard_asks_for_numbers_that_there_are() -> None:
    dashboard = json.loads((MANIFESTS / "monitoring" / "dashboard.json").read_text())
    asked = set(re.findall(r"datastore_controller_\w+", json.dumps(dashboard)))
    made = {
        name
        for each in vars(metrics).values()
        if isinstance(each, MetricWrapperBase)
        for family in each.collect()
        for name in (family.name, f"{family.name}_total", f"{family.name}_bucket")
    }
    assert asked <= made
