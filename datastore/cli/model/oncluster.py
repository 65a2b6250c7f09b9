"""`datastore model save`, `export` and `tag` with --cluster: create or change an object, and follow its Job."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Any

import typer

from datastore.api.datastore import API_VERSION
from datastore.api.model import EXPORT, VERSION_KIND
from datastore.api.objects import condition
from datastore.api.resources import DATASTORES, EXPORTS, MODELS, VERSIONS, Resource
from datastore.cli.console import Format, note, print_json
from datastore.cli.model.work import Shown, run
from datastore.errors import NotFound, Unreachable
from datastore.kubeclient import Conflict, KubeClient, Outage, of_context
from datastore.models.errors import ModelError
from datastore.models.names import Reference
from datastore.models.progress import Progress
from datastore.mounting.signals import Interrupted, watching

OnCluster = Annotated[
    str,
    typer.Option(
        "--namespace", "-n", help="With --cluster: namespace of the objects. Default: that of kubectl's context."
    ),
]
POLL_S = 1.0
TRIES = 5
MOVE_S = 300.0
"""Longest wait for the Job that moves an alias; its pod may have to be scheduled."""


def save_on_cluster(
    model: str,
    source: str,
    labels: Mapping[str, str],
    force: bool,
    namespace: str,
    wait: bool,
    shown: Shown,
    output: Format,
) -> None:
    """Create a ModelVersion; with `wait` stay until it is saved. Errors: DatastoreError; ModelError if it failed."""
    spec = {"model": model, "from": _place("--from", source), "labels": dict(labels), "force": force}
    made, status = _made(VERSION_KIND, VERSIONS, model, spec, namespace, wait, shown)
    if output is Format.JSON:
        print_json(status or made)
    elif status:
        note(f"{model}:{status['version']}: {status['message']}, {status.get('size', '')}, {status['digest']}")


def export_on_cluster(asked: Reference, target: str, namespace: str, wait: bool, shown: Shown) -> None:
    """Create a ModelExport; with `wait` stay until it is complete. Errors: as of save_on_cluster."""
    there = target.removeprefix("oci:")
    place = _of_bucket(there, namespace) if there.startswith("s3://") else _place("TARGET", there)
    form = "oci" if target.startswith("oci:") else "tar" if target.endswith(".tar") else "directory"
    if not place["path"]:
        raise typer.BadParameter(f"{target}: say below which path of the Datastore, such as {place['datastore']}/out")
    which = {"version": asked.version} if asked.version else {"alias": asked.alias} if asked.alias else {}
    spec = {"model": asked.model, **which, "to": place, "format": form}
    _, status = _made(EXPORT, EXPORTS, asked.model, spec, namespace, wait, shown)
    if status:
        note(f"{status['message']}: {status['size']}, {status['digest']}")


def tag_on_cluster(asked: Reference, alias: str, namespace: str, expect: int | None, remove: bool, wait: bool) -> None:
    """Change spec.aliases of a Model; with `wait` stay until its status says that the store has the change, and take it
    back if it can't be made.

    Errors: NotFound; Conflict when another client changes the Model at the same time; ModelError; Interrupted.
    """
    client = of_context(os.environ, namespace)
    found = client.get(MODELS, asked.model)
    if found is None:
        raise NotFound(f"there is no Model {asked.model} in namespace {client.namespace}: kubectl get mdl")
    status = found.get("status") or {}
    aliases = {each["name"]: each["version"] for each in status.get("aliases") or ()}
    others, before = _parted(found, alias)
    if expect is not None and expect != aliases.get(alias, 0):
        stands = f"is at {aliases[alias]}" if alias in aliases else "does not exist"
        raise ModelError(f"the alias {alias} of {asked.model} {stands}, not at {expect}; it was left there")
    number = asked.version or (aliases.get(asked.alias) if asked.alias else status.get("latestVersion"))
    if not number:
        known = ", ".join(aliases) or "none"
        raise NotFound(f"the cluster knows no version {asked}; Model {asked.model} has the aliases {known}")
    _list(client, found, alias, others if remove else [*others, {"name": alias, "version": int(number)}])
    if remove:
        note(f"Model {asked.model} no longer lists {alias}; in the store it stays where it is")
        return
    if wait:
        _moved(client, asked.model, alias, int(number), before)
    note(f"{asked.model}:{alias} {'means' if wait else 'is moved to'} version {number}")


def _parted(model: Mapping[str, Any], alias: str) -> tuple[list[Any], list[Any]]:
    """Return the other aliases that a Model lists, and this one."""
    listed = model["spec"].get("aliases") or ()
    return [each for each in listed if each["name"] != alias], [each for each in listed if each["name"] == alias]


def _list(client: KubeClient, found: Mapping[str, Any], alias: str, aliases: Sequence[Mapping[str, Any]]) -> None:
    """Set spec.aliases of the Model that was read as `found`, without undoing concurrent changes of other clients.

    The controller may write the status at any time; then the change is retried. Errors: Conflict.
    """
    about, tries = found["metadata"], TRIES
    while True:
        change = {"metadata": {"resourceVersion": about["resourceVersion"]}, "spec": {"aliases": list(aliases)}}
        tries -= 1
        try:
            client.patch(MODELS, about["name"], change)
            return
        except Conflict:
            seen = client.get(MODELS, about["name"])
            if not tries or seen is None or _state(seen, alias) != _state(found, alias):
                raise
            about = seen["metadata"]


def _state(model: Mapping[str, Any], alias: str) -> tuple[Any, ...]:
    """Return what a change of an alias is based on. The generation counts changes of the Model's spec."""
    metadata, status = model["metadata"], model.get("status") or {}
    meant = [each["version"] for each in status.get("aliases") or () if each["name"] == alias]
    return metadata["uid"], metadata["generation"], meant


def _place(name: str, text: str) -> dict[str, str]:
    """Return a place in a Datastore as a manifest has it. Errors: typer.BadParameter."""
    if text.startswith(("/", ".", "~")) or "://" in text.removeprefix("datastore://"):
        raise typer.BadParameter(f"{name} {text}: with --cluster write DATASTORE/path, of the namespace")
    datastore, _, path = text.removeprefix("datastore://").partition("/")
    return {"datastore": datastore, "path": path.strip("/")}


def _of_bucket(url: str, namespace: str) -> dict[str, str]:
    """Return the place of s3://BUCKET/PREFIX, in the namespace's Datastore whose location is the URL's longest prefix.

    Errors: NotFound when there is none, as a Job has the keys of Datastores only.
    """
    client = of_context(os.environ, namespace)
    places = {
        str((each.get("status") or {}).get("location", "")).rstrip("/") + "/": each["metadata"]["name"]
        for each in client.list(DATASTORES)
    }
    found = max((each for each in places if len(each) > 1 and url.startswith(each)), key=len, default="")
    if not found:
        bucket = url.removeprefix("s3://").partition("/")[0]
        raise NotFound(f"{url}: no Datastore of namespace {client.namespace} is there; apply one with bucket {bucket}")
    return {"datastore": places[found], "path": url.removeprefix(found).strip("/")}


def _made(
    kind: str, resource: Resource, model: str, spec: Mapping[str, Any], namespace: str, wait: bool, shown: Shown
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Create an object that a Job works for. Return it and, with `wait`, its status after the work, else {}."""
    body = {"apiVersion": API_VERSION, "kind": kind, "metadata": {"generateName": f"{model[:57]}-"}, "spec": spec}
    client = of_context(os.environ, namespace)
    made = client.create(resource, body)
    name = made["metadata"]["name"]
    if not wait:
        note(f"{kind} {name} is made in namespace {client.namespace}: kubectl get {kind.lower()} {name}")
        return made, {}
    try:
        return made, run(lambda progress: _followed(client, kind, resource, name, progress), shown)
    except Interrupted:
        note(f"it continues in the cluster: kubectl get {kind.lower()} {name}")
        raise


def _moved(client: KubeClient, model: str, alias: str, number: int, before: Sequence[Mapping[str, Any]]) -> None:
    """Wait until the Model's status has the alias at this version. before: what the Model listed of the alias, to be
    put back when it can't be moved. Errors: ModelError when that fails; NotFound."""
    until = time.monotonic() + MOVE_S
    why = ""
    with watching() as watch:
        while time.monotonic() < until:
            watch.check()
            found = client.get(MODELS, model)
            if found is None:
                raise NotFound(f"Model {model} was deleted in the meantime")
            status = found.get("status") or {}
            if {"name": alias, "version": number} in (status.get("aliases") or ()):
                return
            told = condition(found, "StoreUpdated")
            current = told.get("observedGeneration") == found["metadata"]["generation"]
            why = str(told.get("message", ""))
            if current and told.get("status") == "False" and told["reason"] in ("ModelNotFound", "ModelError"):
                with suppress(Conflict):  # another client has changed it in the meantime
                    _list(client, found, alias, [*_parted(found, alias)[0], *before])
                break
            time.sleep(POLL_S)
    raise ModelError(f"the alias {alias} of {model} was not moved to {number}: {why or 'its Job has not ended'}")


def _followed(client: KubeClient, kind: str, resource: Resource, name: str, progress: Progress) -> dict[str, Any]:
    """Wait until the work has ended; return its status. Errors: ModelError if it failed; NotFound if it was deleted."""
    told, message = ("", 0, 0), ""
    outage = Outage()
    while True:
        progress.check()
        try:
            found = client.get(resource, name)
        except Unreachable as error:
            if outage.bear(error):
                note(f"{error}; the work continues, and is shown again when it answers")
            time.sleep(POLL_S)
            continue
        outage.over()
        if found is None:
            raise NotFound(f"{kind} {name} was deleted in the meantime")
        status: dict[str, Any] = found.get("status") or {}
        if status.get("phase") in ("Ready", "Complete"):
            return status
        if status.get("phase") == "Failed":
            raise ModelError(f"{kind} {name}: {status.get('message', '')}")
        if status.get("phase") == "Pending" and status.get("message") != message:
            message = status.get("message", "")
            note(f"waiting: {message}")
        told = _tell(progress, status.get("progress") or {}, told)
        time.sleep(POLL_S)


def _tell(progress: Progress, said: Mapping[str, Any], told: tuple[str, int, int]) -> tuple[str, int, int]:
    """Count the progress since the last call. told: phase, files and bytes of that call; the new ones are returned."""
    if not said:
        return told
    phase, files, size_bytes = told
    if said["phase"] != phase:
        phase, files, size_bytes = said["phase"], 0, 0
        progress.begin(phase, said.get("filesTotal", 0), said.get("bytesTotal", 0))
    progress.count(said.get("files", 0) - files, said.get("bytes", 0) - size_bytes)
    return phase, said.get("files", 0), said.get("bytes", 0)
