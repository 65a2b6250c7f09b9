"""datastore.api.model: valid objects, and one line for each mistake."""

from __future__ import annotations

import pytest

from datastore.api.manifest import Manifest, parse
from datastore.api.model import DEFAULT_IMAGE, DEFAULT_PATH, Model
from datastore.errors import InvalidManifest
from tests.promises import promise

HEAD = "apiVersion: datastore.dev/v1alpha1\nkind: {}\nmetadata: {{name: {}}}\n"


def read(kind: str, spec: str, name: str = "digits") -> Manifest:
    return parse(f"{HEAD.format(kind, name)}spec: {spec}\n", "f.yaml", kind)


def complaint(kind: str, spec: str, name: str = "digits") -> str:
    with pytest.raises(InvalidManifest) as caught:
        read(kind, spec, name)
    text = str(caught.value)
    assert "\n" not in text
    return text.partition(": ")[2]


@promise("S-390")
def test_one_file_holds_all_of_them() -> None:
    text = "---\n".join(
        [
            HEAD.format("Datastore", "models") + "spec: {local: {path: /m}}\n",
            HEAD.format("Model", "digits"),
            HEAD.format("ModelVersion", "digits-1") + "spec: {model: digits, from: {datastore: runs, path: a/}}\n",
            HEAD.format("Serving", "digits") + "spec: {model: digits, alias: prod}\n",
        ]
    )
    found = parse(text, "f.yaml")
    assert [each.name for each in found.models] == ["digits"]
    assert [each.name for each in found.model_versions] == ["digits-1"]
    assert [each.name for each in found.servings] == ["digits"]


@promise("S-390")
def test_what_is_left_out_has_a_default() -> None:
    assert (
        Model.model_validate({"apiVersion": "datastore.dev/v1alpha1", "kind": "Model", "metadata": {"name": "m"}}).store
        == "models"
    )
    [version] = read("ModelVersion", "{model: digits, version: 7}").model_versions
    assert (version.spec.version, version.spec.source, version.spec.force) == (7, None, False)
    [serving] = read("Serving", "{model: digits, version: 7}").servings
    spec = serving.spec
    assert (spec.image, spec.path, spec.protocol, spec.listens) == (DEFAULT_IMAGE, DEFAULT_PATH, "grpc", 8500)
    [serving] = read("Serving", "{model: digits, alias: prod, protocol: http}").servings
    assert serving.spec.listens == 8501
    [serving] = read("Serving", "{model: digits, alias: prod, autoscaling: {maxReplicas: 4}}").servings
    assert serving.spec.autoscaling is not None
    assert (serving.spec.autoscaling.min_replicas, serving.spec.autoscaling.target_cpu_percent) == (1, 80)


ONE_OF = "must have exactly one of from (save that directory) and version (one that the store has)"


@promise("S-390")
@pytest.mark.parametrize(
    ("kind", "spec", "line"),
    [
        ("Model", "{stor: models}", "spec.stor is not a field; did you mean spec.store?"),
        ("ModelVersion", "{from: {datastore: runs}}", "spec.model is missing: Name of the Model"),
        ("ModelVersion", "{model: digits}", f"spec {ONE_OF}"),
        ("ModelVersion", "{model: digits, version: 1, from: {datastore: runs}}", f"spec {ONE_OF}"),
        ("ModelVersion", "{model: Digits, version: 1}", "spec.model must have at most 63 lower-case letters"),
        ("ModelVersion", "{model: digits, version: 0}", "spec.version must be greater than or equal to 1"),
        ("ModelVersion", "{model: digits, version: '7'}", "spec.version must be a whole number"),
        ("ModelVersion", "{model: digits, from: {datastore: runs, path: ../x}}", "spec.from.path must be a path below"),
        ("ModelVersion", "{model: digits, version: 1, aliases: [latest]}", "spec.aliases[0] must not be 'latest'"),
        ("ModelVersion", "{model: digits, version: 1, aliases: ['7']}", "a letter first, not '7'"),
        ("Serving", "{model: digits}", "spec must have exactly one of version and alias"),
        ("Serving", "{model: digits, alias: prod, version: 2}", "spec must have exactly one of version and alias"),
        (
            "Serving",
            "{model: digits, alias: prod, replicas: 2, autoscaling: {maxReplicas: 3}}",
            "spec must have at most one of replicas and autoscaling",
        ),
        (
            "Serving",
            "{model: digits, alias: prod, autoscaling: {minReplicas: 4, maxReplicas: 3}}",
            "spec.autoscaling has minReplicas 4 above maxReplicas 3",
        ),
        ("Serving", "{model: digits, alias: prod, port: 70000}", "spec.port must be less than or equal to 65535"),
        (
            "Serving",
            "{model: digits, alias: prod, protocol: rest}",
            "spec.protocol must be 'grpc' or 'http', not 'rest'",
        ),
        ("Serving", "{model: digits, alias: prod, path: models}", "spec.path must be an absolute path"),
    ],
)
def test_each_wrong_field_is_reported_in_one_line(kind: str, spec: str, line: str) -> None:
    assert line in complaint(kind, spec)


@promise("S-390")
@pytest.mark.parametrize("kind", ["Model", "ModelVersion", "Serving"])
def test_a_name_must_fit_where_it_is_used(kind: str) -> None:
    """The name is also that of Services and claims."""
    spec = {"Model": "{}", "ModelVersion": "{model: m, version: 1}", "Serving": "{model: m, version: 1}"}[kind]
    assert "metadata.name must have at most 63 lower-case letters" in complaint(kind, spec, "a.b")
    assert "metadata.name must have at most 63 lower-case letters" in complaint(kind, spec, "a" * 64)
