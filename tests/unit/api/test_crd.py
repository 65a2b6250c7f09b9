"""datastore.api.crd and schema: the generated CustomResourceDefinition."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from datastore.api import crd, reference
from datastore.api.datastore import Datastore
from datastore.api.fields import Bucket, Endpoint, Prefix, SizeBytes
from datastore.api.kinds import DATASTORE, KINDS, Kind
from datastore.api.manifest import MODULES, model_of
from tests.promises import promise

REFERENCE = Path(__file__).parents[3] / "docs" / "reference"


def schemas(node: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    yield path, node
    for name, inner in node.get("properties", {}).items():
        yield from schemas(inner, f"{path}.{name}")
    for place in ("items", "additionalProperties"):
        if isinstance(node.get(place), dict):
            yield from schemas(node[place], f"{path}[]")


ALL = dict(schemas(crd.schema(DATASTORE)))
EVERY = {f"{kind.name}{path}": node for kind in KINDS for path, node in schemas(crd.schema(kind))}
"""Of all kinds: 'TrainingJob.spec.image' and so on."""


def test_the_checked_in_crd_is_what_the_models_say() -> None:
    assert crd.path().read_text() == crd.text(), "run: python -m datastore.api.crd"


def test_a_file_is_read_as_the_kinds_of_the_cluster() -> None:
    assert {name: model_of(name) for name in MODULES} == {kind.name: kind.model for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_the_checked_in_reference_is_what_the_models_say(kind: Kind) -> None:
    said = (REFERENCE / kind.page).read_text()
    assert said == reference.text(kind), f"run: python -m datastore.api.reference {REFERENCE}"


def test_the_schema_is_structural() -> None:
    for path, node in EVERY.items():
        assert not {"$ref", "$defs", "allOf", "oneOf", "not", "const", "title", "nullable"} & set(node), path
        if node.get("x-kubernetes-int-or-string"):
            assert node["anyOf"] == [{"type": "integer"}, {"type": "string"}], path
            assert "type" not in node, path
        else:
            assert "anyOf" not in node, path
            assert node["type"] in ("object", "array", "string", "boolean", "integer", "number"), path
        if "properties" in node:
            assert "additionalProperties" not in node, path
            assert set(node.get("required", [])) <= set(node["properties"]), path


def test_every_field_is_described() -> None:
    fields = {path for path in EVERY if path.partition(".")[2].startswith(("spec", "status")) and "[]" not in path}
    assert {path for path in fields if not EVERY[path].get("description", "").endswith(".")} == set()
    assert len(fields) > 100


@promise("S-204")
def test_every_value_is_bounded() -> None:
    """The API server also estimates the cost of CEL rules by it, and refuses a CRD that may cost too much."""
    for path, node in EVERY.items():
        if (node.get("type") == "string" or "anyOf" in node) and "enum" not in node and "format" not in node:
            assert node.get("maxLength", 1 << 30) <= 64 << 10, path
        if node.get("type") == "array":
            assert "maxItems" in node, path
        if "additionalProperties" in node:
            assert "maxProperties" in node, path


def test_patterns_need_no_look_around() -> None:
    """The API server's regular expressions are RE2."""
    for path, node in EVERY.items():
        pattern = node.get("pattern", "")
        assert not re.search(r"\(\?[=!<]|\\[1-9ZzA]", pattern), path
        re.compile(pattern)


def test_what_the_api_server_fills_in_is_what_the_models_take_for_granted() -> None:
    spec = {"s3": {"bucket": "digits"}}
    document = {"apiVersion": "datastore.dev/v1alpha1", "kind": "Datastore", "metadata": {"name": "a"}, "spec": spec}
    plain = Datastore.model_validate(document)
    filled = {**spec, "readOnly": False, "reclaimPolicy": "Retain", "cache": {"size": "10Gi"}}
    assert Datastore.model_validate({**document, "spec": filled}) == plain


def accepted(node: dict[str, Any], value: str) -> bool:
    """What the API server says of a text, by pattern, length and the one CEL rule of buckets."""
    inside = node.get("minLength", 0) <= len(value) <= node.get("maxLength", 1 << 30)
    address = "x-kubernetes-validations" in node and re.fullmatch(r"[0-9]+([.][0-9]+){3}", value)
    # RE2's $ without (?m) is the end of the text; Python's also takes the place before a last newline.
    found = re.search(node["pattern"].replace("$", r"\Z") if node["pattern"].endswith("$") else node["pattern"], value)
    return inside and not address and found is not None


@pytest.mark.parametrize(
    ("kind", "path", "alphabet"),
    [
        (Bucket, ".spec.s3.bucket", "ab1.-A_\n"),
        (Prefix, ".spec.s3.prefix", "ab/.\n\x00é"),
        (SizeBytes, ".spec.capacity", "1234.GiMkme+\n"),
    ],
)
def test_the_command_and_the_api_server_take_the_same_texts(kind: Any, path: str, alphabet: str) -> None:
    adapter: TypeAdapter[Any] = TypeAdapter(kind)

    @given(st.text(alphabet, max_size=12))
    def agree(value: str) -> None:
        try:
            adapter.validate_python(value)
            valid = True
        except ValidationError as error:
            # "more than 0" and "less than 8Ei" are beyond a pattern.
            valid = any(each["msg"].endswith(("more than 0", "less than 8Ei")) for each in error.errors())
        assert valid == accepted(ALL[path], value)

    agree()


@pytest.mark.parametrize(
    "value", ["http://a", "https://a.b:1/", "http://[::1]:9", "http://a b", "ftp://a", "http://a:b", "http://"]
)
def test_the_command_and_the_api_server_take_the_same_endpoints(value: str) -> None:
    adapter: TypeAdapter[Any] = TypeAdapter(Endpoint)
    try:
        adapter.validate_python(value)
        valid = True
    except ValidationError:
        valid = False
    assert valid == accepted(ALL[".spec.s3.endpoint"], value)
