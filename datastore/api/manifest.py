"""Reads a manifest file: turns its YAML documents into our objects and Secrets, or says in one line what is wrong.

Documents of other kinds are ignored, so one file can hold a Datastore and the Deployment that uses it. YAML is read as
kubectl reads it, except that a field given twice is an error and a date is text.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from datastore.api import datastore
from datastore.api.datastore import API_VERSION, GROUP, ApiObject, Datastore
from datastore.api.explain import explain, similar
from datastore.api.names import DEFAULT_STORE
from datastore.api.secretmanifest import SecretManifest, parse_secret
from datastore.errors import InvalidManifest

if TYPE_CHECKING:
    from datastore.api.model import Model, ModelVersion, Serving
    from datastore.api.trainingjob import TrainingJob

MODULES = {
    "Datastore": "datastore",
    "TrainingJob": "trainingjob",
    "Model": "model",
    "ModelVersion": "model",
    "ModelExport": "model",
    "Serving": "model",
}
"""The module with the class of each kind, imported only for a file that has this kind: an import takes 0.1 s."""
_SECRET = "Secret"  # noqa: S105  (the kind, not one of them)
MAX_BYTES = 4 << 20
"""The size limit of a manifest, which is written by a person; etcd takes at most 1.5 MiB for an object."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The objects of one file."""

    source: str
    datastores: tuple[Datastore, ...]
    secrets: tuple[SecretManifest, ...] = ()
    jobs: tuple[TrainingJob, ...] = ()
    models: tuple[Model, ...] = ()
    model_versions: tuple[ModelVersion, ...] = ()
    servings: tuple[Serving, ...] = ()
    text: str = field(default="", repr=False)
    """The whole text of the file; it may hold credentials."""

    def pick(self, name: str | None = None, namespace: str | None = None) -> Datastore:
        """Return the Datastore of this name or, without a name, the only one. Errors: InvalidManifest."""
        return _pick(self.datastores, datastore.KIND, self.source, name, namespace)

    def pick_store(self, name: str | None = None) -> Datastore:
        """Return the Datastore of this name; without a name `models`, else the only one. Errors: InvalidManifest."""
        if name is None and any(each.name == DEFAULT_STORE for each in self.datastores):
            name = DEFAULT_STORE
        if name is None and len(self.datastores) > 1:
            names = ", ".join(each.name for each in self.datastores)
            raise InvalidManifest(f"{self.source}: say which Datastore holds the models, --store NAME: {names}")
        return self.pick(name)

    def check_writable(self, datastore: Datastore) -> None:
        """Errors: InvalidManifest when the Datastore is read-only."""
        if datastore.spec.read_only:
            raise InvalidManifest(
                f"{self.source}: Datastore {datastore.name}: spec.readOnly is true, so nothing is written there; name "
                "another Datastore, or change that"
            )

    def pick_job(self, name: str | None = None) -> TrainingJob:
        """Return the TrainingJob of this name or, without a name, the only one. Errors: InvalidManifest."""
        return _pick(self.jobs, "TrainingJob", self.source, name, None)


Named = TypeVar("Named", bound=ApiObject)


def _pick(objects: Sequence[Named], kind: str, source: str, name: str | None, namespace: str | None) -> Named:
    within = [each for each in objects if namespace in (None, each.metadata.namespace)]
    names = [each.name for each in within]
    if name is None and len(names) == 1:
        return within[0]
    if name is None:
        raise InvalidManifest(f"{source} holds several {kind}s, name one: {', '.join(names)}")
    found = [each for each in within if each.name == name]
    if not found:
        near = similar(name, names)
        hint = f"did you mean {near}?" if near else f"it holds {', '.join(names) or 'none'}"
        raise InvalidManifest(f"{source} holds no {kind} {name!r}; {hint}")
    if len(found) > 1:
        raise InvalidManifest(f"{source} holds {kind} {name!r} in several namespaces; keep one of them")
    return found[0]


def load(path: Path | str, wanted: str = datastore.KIND) -> Manifest:
    """Read a file, or standard input for '-'. Errors: InvalidManifest, also without an object of the kind `wanted`."""
    text, source = _read(path)
    return parse(text, source, wanted)


def documents(path: Path | str) -> list[Mapping[str, Any]]:
    """Return every object of a file as it was written, of any kind. Errors: InvalidManifest."""
    return [document for _, document in _objects(*_read(path))]


def objects_of(manifest: Manifest) -> list[Mapping[str, Any]]:
    """Return every object of a manifest as it was written."""
    return [document for _, document in _objects(manifest.text, manifest.source)]


def _read(path: Path | str) -> tuple[str, str]:
    """Return the text of a file, and its name for errors."""
    source = "standard input" if str(path) == "-" else str(path)
    try:
        if str(path) == "-":
            raw = sys.stdin.buffer.read(MAX_BYTES + 1)
        else:
            with Path(path).open("rb") as file:
                raw = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise InvalidManifest(f"{source}: can't be read: {error.strerror}{_file_advice(source)}") from error
    if len(raw) > MAX_BYTES:
        raise InvalidManifest(f"{source}: is over {MAX_BYTES >> 20} MiB, so it is no manifest")
    try:
        return raw.decode("utf-8-sig"), source
    except UnicodeDecodeError:
        raise InvalidManifest(f"{source}: is not UTF-8 text, so it is no manifest") from None


def _file_advice(source: str) -> str:
    """Return what to write in place of the address of a bucket, as other tools take it, or ''."""
    scheme, _, rest = source.partition("://")
    if scheme != "s3":
        return ""
    bucket, _, prefix = rest.partition("/")
    fields = f"bucket: {bucket}" + (f", prefix: {prefix}" if prefix else "")
    spec = f"metadata: {{name: {bucket}}}, spec: {{s3: {{{fields}}}}}"
    return f"; name a YAML file in place of an address, with {{apiVersion: {API_VERSION}, kind: Datastore, {spec}}}"


def parse(text: str, source: str, wanted: str = datastore.KIND) -> Manifest:
    """Parse the text of a file. source: its name in errors; wanted: see load(), or ''. Errors: InvalidManifest."""
    found: dict[str, dict[tuple[str, str], Any]] = {name: {} for name in (*MODULES, _SECRET)}
    for number, document in _objects(text, source):
        where = f"{source}, document {number}"
        try:
            if document.get("kind") == _SECRET and document.get("apiVersion") == "v1":
                secret = parse_secret(document)
                _add(found[_SECRET], (secret.namespace, secret.name), secret, _SECRET)
            elif kind := _kind_of(document):
                each = _validated(document, model_of(kind))
                _add(found[kind], (each.metadata.namespace, each.metadata.name), each, kind)
        except InvalidManifest as error:
            raise InvalidManifest(f"{where}{_named(document)}: {error}") from error.__cause__
    if wanted and not found[wanted]:
        raise InvalidManifest(f"{source}: holds no {wanted} (apiVersion: {API_VERSION}, kind: {wanted})")
    return Manifest(
        source=source,
        datastores=tuple(found[datastore.KIND].values()),
        secrets=tuple(found[_SECRET].values()),
        jobs=tuple(found["TrainingJob"].values()),
        models=tuple(found["Model"].values()),
        model_versions=tuple(found["ModelVersion"].values()),
        servings=tuple(found["Serving"].values()),
        text=text,
    )


def _add(known: dict[tuple[str, str], Any], key: tuple[str, str], value: object, kind: str) -> None:
    if key in known:
        raise InvalidManifest(f"metadata.name {key[1]!r} is taken by another {kind} of this file")
    known[key] = value


def model_of(kind: str) -> type[BaseModel]:
    """Return the class of a kind."""
    model: type[BaseModel] = getattr(import_module(f"datastore.api.{MODULES[kind]}"), kind)
    return model


def _validated(document: Mapping[str, Any], model: type[BaseModel]) -> Any:
    try:
        return model.model_validate(document)
    except ValidationError as error:
        # `from None`: pydantic's text holds the input, and the input may hold a misplaced key.
        raise InvalidManifest(explain(error, model)) from None


def _kind_of(document: Mapping[str, Any]) -> str | None:
    """Return which of our kinds a document is, or None. Errors: InvalidManifest for a misspelt kind or version."""
    kind, version = document.get("kind"), document.get("apiVersion")
    for key, value, ours in (("kind", kind, datastore.KIND), ("apiVersion", version, API_VERSION)):
        if not isinstance(value, str):
            raise InvalidManifest(f"{key} is missing; a Datastore has {key}: {ours}")
    group = str(version).partition("/")[0]
    known = kind in MODULES
    if known and version != API_VERSION and (group == GROUP or similar(str(version), [API_VERSION])):
        raise InvalidManifest(f"apiVersion must be {API_VERSION}, not {str(version)[:64]!r}")
    if not known and group == GROUP and (near := similar(str(kind), list(MODULES))):
        raise InvalidManifest(f"kind must be {near}, not {str(kind)[:64]!r}")
    return str(kind) if known and version == API_VERSION else None


def _named(document: Mapping[str, Any]) -> str:
    metadata = document.get("metadata")
    name = metadata.get("name") if isinstance(metadata, Mapping) else None
    shown = isinstance(name, str) and len(name) <= 253 and name.isprintable()
    return f" ({document.get('kind', 'no kind')} {name})" if shown else ""


def _objects(text: str, source: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield every object with the number of its document, the items of a v1 List one by one; skip empty documents."""
    for number, document in enumerate(_documents(text, source), start=1):
        if document is None:
            continue
        if not isinstance(document, Mapping):
            raise InvalidManifest(f"{source}, document {number}: must be a mapping: apiVersion, kind, ...")
        listed = document.get("items") if document.get("kind") == "List" else None
        for each in listed if isinstance(listed, list) else [document]:
            if isinstance(each, Mapping):
                yield number, each


def _documents(text: str, source: str) -> Iterator[Any]:
    try:
        yield from yaml.load_all(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise InvalidManifest(f"{source}{where}: not valid YAML: {error.problem}") from None
    except (yaml.YAMLError, ValueError, OverflowError):
        # The texts of these errors quote the file.
        raise InvalidManifest(f"{source}: not valid YAML: it holds a character or a value that YAML refuses") from None
    except RecursionError:
        raise InvalidManifest(f"{source}: not a manifest: nested too deeply") from None


class _Loader(yaml.SafeLoader):
    """SafeLoader that refuses a field given twice and leaves dates as text."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """Construct a mapping. Errors: ConstructorError when a field is given twice."""
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in seen:
                    problem = f"the field {key.value!r} is there twice"
                    raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep)


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
