"""Reading a manifest file: YAML documents in, Datastores and Secrets out, or one line that says what is wrong.

Documents of other kinds are let through unread, so one file can hold a Datastore and the Job that uses it. YAML is read
as kubectl reads it, except that a field given twice is an error and a date is text.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from datastore.api.datastore import API_VERSION, GROUP, KIND, Datastore
from datastore.api.explain import explain, similar
from datastore.api.secretmanifest import SecretManifest, parse_secret
from datastore.errors import InvalidManifest

MAX_BYTES = 4 << 20
"""A manifest is written by a person; etcd takes 1.5 MiB an object."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What one file holds."""

    source: str
    datastores: tuple[Datastore, ...]
    secrets: tuple[SecretManifest, ...] = ()

    def pick(self, name: str | None = None) -> Datastore:
        """The Datastore of this name, or the only one. Errors: InvalidManifest."""
        names = [each.name for each in self.datastores]
        if name is None:
            if len(names) > 1:
                raise InvalidManifest(f"{self.source} holds several Datastores, name one: {', '.join(names)}")
            return self.datastores[0]
        found = [each for each in self.datastores if each.name == name]
        if not found:
            near = similar(name, names)
            hint = f"did you mean {near}?" if near else f"it holds {', '.join(names)}"
            raise InvalidManifest(f"{self.source} holds no Datastore {name!r}; {hint}")
        if len(found) > 1:
            raise InvalidManifest(f"{self.source} holds Datastore {name!r} in several namespaces; keep one of them")
        return found[0]


def load(path: Path | str) -> Manifest:
    """Read a file, or standard input for '-'. Errors: InvalidManifest."""
    source = "standard input" if str(path) == "-" else str(path)
    try:
        if str(path) == "-":
            raw = sys.stdin.buffer.read(MAX_BYTES + 1)
        else:
            with Path(path).open("rb") as file:
                raw = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise InvalidManifest(f"{source}: can't be read: {error.strerror}") from error
    if len(raw) > MAX_BYTES:
        raise InvalidManifest(f"{source}: is over {MAX_BYTES >> 20} MiB, so it is no manifest")
    try:
        return parse(raw.decode("utf-8-sig"), source)
    except UnicodeDecodeError:
        raise InvalidManifest(f"{source}: is not UTF-8 text, so it is no manifest") from None


def parse(text: str, source: str) -> Manifest:
    """Parse the text of a file; `source` names it in errors. Errors: InvalidManifest."""
    datastores: dict[tuple[str, str], Datastore] = {}
    secrets: dict[tuple[str, str], SecretManifest] = {}
    for number, document in _objects(text, source):
        where = f"{source}, document {number}"
        try:
            if document.get("kind") == "Secret" and document.get("apiVersion") == "v1":
                secret = parse_secret(document)
                _add(secrets, (secret.namespace, secret.name), secret, "Secret")
            elif _is_datastore(document):
                datastore = _datastore(document)
                _add(datastores, (datastore.metadata.namespace, datastore.name), datastore, KIND)
        except InvalidManifest as error:
            raise InvalidManifest(f"{where}{_named(document)}: {error}") from error.__cause__
    if not datastores:
        raise InvalidManifest(f"{source}: holds no Datastore (apiVersion: {API_VERSION}, kind: {KIND})")
    return Manifest(source=source, datastores=tuple(datastores.values()), secrets=tuple(secrets.values()))


def _add(known: dict[tuple[str, str], Any], key: tuple[str, str], value: object, kind: str) -> None:
    if key in known:
        raise InvalidManifest(f"metadata.name {key[1]!r} is taken by another {kind} of this file")
    known[key] = value


def _datastore(document: Mapping[str, Any]) -> Datastore:
    try:
        return Datastore.model_validate(document)
    except ValidationError as error:
        # No `from`: pydantic's text holds the input, and the input may hold a misplaced key.
        raise InvalidManifest(explain(error, Datastore)) from None


def _is_datastore(document: Mapping[str, Any]) -> bool:
    """Whether a document is one of ours; a near miss is an error, since it would be ignored silently otherwise."""
    kind, version = document.get("kind"), document.get("apiVersion")
    for field, value, ours in (("kind", kind, KIND), ("apiVersion", version, API_VERSION)):
        if not isinstance(value, str):
            raise InvalidManifest(f"{field} is missing; a Datastore has {field}: {ours}")
    group = str(version).partition("/")[0]
    if kind == KIND and version != API_VERSION and (group == GROUP or similar(str(version), [API_VERSION])):
        raise InvalidManifest(f"apiVersion must be {API_VERSION}, not {str(version)[:64]!r}")
    if kind != KIND and group == GROUP and similar(str(kind), [KIND]):
        raise InvalidManifest(f"kind must be {KIND}, not {str(kind)[:64]!r}")
    return kind == KIND and version == API_VERSION


def _named(document: Mapping[str, Any]) -> str:
    metadata = document.get("metadata")
    name = metadata.get("name") if isinstance(metadata, Mapping) else None
    shown = isinstance(name, str) and len(name) <= 253 and name.isprintable()
    return f" ({document.get('kind', 'no kind')} {name})" if shown else ""


def _objects(text: str, source: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Every object with the number of its document, the items of a v1 List one by one; empty documents are skipped."""
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
        # The texts of these quote the file.
        raise InvalidManifest(f"{source}: not valid YAML: it holds a character or a value that YAML refuses") from None
    except RecursionError:
        raise InvalidManifest(f"{source}: not a manifest: nested too deeply") from None


class _Loader(yaml.SafeLoader):
    """SafeLoader that refuses a field given twice and leaves dates as text."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """Like the parent's, after a look for doubles."""
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
