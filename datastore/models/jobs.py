"""The program in the pods of the Jobs that the controller makes for models: `python -m datastore.models.jobs`.

Each progress event is a line of JSON on standard output. The answer is the last line, and the termination message of
the pod. The names that the controller and this program share are in jobcontract.py.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from datastore.api.resolve import source_of
from datastore.api.secretmanifest import SecretManifest, for_storage
from datastore.api.source import Source
from datastore.api.volumecontext import SPEC, Reference, from_context
from datastore.errors import DatastoreError, InvalidManifest, StoreError
from datastore.models.errors import SaveLost, VersionDamaged
from datastore.models.jobcontract import EXIT_AGAIN, EXIT_FINAL, REQUEST, SECRETS
from datastore.models.manifest import Lineage, VersionManifest
from datastore.models.names import Reference as VersionReference
from datastore.models.opening import located, opened_storage, opened_tree
from datastore.models.progress import Event, Progress
from datastore.models.registry import Models, Use
from datastore.models.repeatable import export_repeatably
from datastore.models.saving import Wish, save
from datastore.models.verifying import verify
from datastore.secret import Secret

ANSWER = Path("/dev/termination-log")
MESSAGE_CHARS = 900
"""The most characters of an error's text in an answer; the kubelet keeps 4,096 bytes of an answer."""
TOLD_EVERY_S = 1.0
ALIASES_MAX = 32
"""The most aliases in an answer; the store may have more."""

Request = Mapping[str, Any]


def main() -> int:
    """Carry out the request and return the exit code."""
    progress = Progress(_teller())
    signal.signal(signal.SIGTERM, lambda *_: progress.stop(resume=True))
    try:
        answer, code = perform(json.loads(os.environ[REQUEST]), progress), 0
    except DatastoreError as error:
        answer, code = {"reason": reason_of(error), "error": str(error)[:MESSAGE_CHARS]}, exit_code(error)
    text = json.dumps(answer, ensure_ascii=False)
    sys.stdout.write(text + "\n")
    ANSWER.write_text(text)
    return code


def perform(request: Request, progress: Progress) -> dict[str, Any]:
    """Carry out a request and return the answer. Errors: DatastoreError."""
    with _place(request, "store") as (store, location), opened_storage(store, location) as storage:
        models = Models(storage, who=str(request["who"]))
        verb = {"save": _save, "adopt": _adopt, "delete": _delete, "update": _update, "export": _export}[request["do"]]
        return verb(models, request, progress)


def exit_code(error: DatastoreError) -> int:
    """Return EXIT_AGAIN when the same request may succeed later, else EXIT_FINAL."""
    again = isinstance(error, SaveLost) or (isinstance(error, StoreError) and error.transient)
    return EXIT_AGAIN if again else EXIT_FINAL


def reason_of(error: DatastoreError) -> str:
    """Return the name of the error's class, as one CamelCase word for a status condition."""
    return type(error).__name__


def _save(models: Models, request: Request, progress: Progress) -> dict[str, Any]:
    lineage = dict(request.get("lineage") or {})
    command = tuple(lineage.pop("command", ()))
    path = str(request.get("path", ""))
    with _place(request, "source") as (source, location), opened_tree(source, path, location) as tree:
        wish = Wish(
            model=str(request["model"]),
            lineage=Lineage(**lineage, command=command, location=tree.location, path=path),
            labels=dict(request.get("labels") or {}),
            force=bool(request.get("force")),
            save_id=str(request["saveId"]),
        )
        saved = save(models, tree, wish, progress)
    # A version with this save's id was made by this save, in an earlier pod that ended before it could answer.
    own = saved.new or saved.manifest.save_id == wish.save_id
    return {**_told(models, saved.manifest, request), "new": own}


def _adopt(models: Models, request: Request, progress: Progress) -> dict[str, Any]:
    """Read every byte of a version that the store already has, and return what status says of it."""
    manifest, damages = verify(models, str(request["model"]), int(request["number"]), progress)
    if damages:
        raise VersionDamaged("; ".join(damages[:3]) + (f"; and {len(damages) - 3} more" if len(damages) > 3 else ""))
    return {**_told(models, manifest, request), "new": False}


def _delete(models: Models, request: Request, _: Progress) -> dict[str, Any]:
    """Delete the version that a save made, if there is one, and the model's garbage; return what status says of it.

    Errors: VersionInUse; VersionDamaged when the version may be one whose manifest does not tell any more.
    """
    model, save_id = str(request["model"]), str(request["saveId"])
    damage = None
    for head in models.versions(model):
        damage = damage or head.damage
        if head.save_id == save_id:
            models.delete(model, head.version)
            break
    else:
        if damage is not None:
            raise damage
    for garbage in models.garbage(model):
        models.remove_garbage(garbage)
    return _of_model(models, model)


def _update(models: Models, request: Request, _: Progress) -> dict[str, Any]:
    """Move the aliases that a Model lists, and record which of its versions Servings use.

    moves: a version number by alias. pins: by a Serving's UID its `version` (null: none), what it `was`, and `who`.
    """
    model = str(request["model"])
    for alias, number in dict(request["moves"]).items():
        models.set_alias(model, str(alias), int(number))
    for uid, pin in dict(request["pins"]).items():
        if pin.get("was") and pin["was"] != pin.get("version"):
            models.remove_use(model, int(pin["was"]), str(uid))
        if pin.get("version"):
            models.add_use(model, int(pin["version"]), Use(id=str(uid), who=str(pin["who"])))
    return _of_model(models, model)


def _export(models: Models, request: Request, progress: Progress) -> dict[str, Any]:
    """Export a version, comparing it with its manifest before and after; a repeated request continues the export."""
    model, path = str(request["model"]), str(request["path"])
    number = models.resolve(VersionReference(model, version=request.get("version"), alias=request.get("alias")))
    with _place(request, "target") as (target, location):
        manifest = export_repeatably(models, model, number, target, path, request["format"], progress)
    return _of_version(manifest, f"{location}/{path}")


def _told(models: Models, manifest: VersionManifest, request: Request) -> dict[str, Any]:
    """Move the requested aliases to a version; return what status says of the version and of its model."""
    model, number = manifest.model, manifest.version
    for alias in request.get("aliases") or ():
        models.set_alias(model, str(alias), number)
    of_version = _of_version(manifest, models.tree(model, number).location)
    return {**of_version, "saved": manifest.saved, **_of_model(models, model)}


def _of_version(manifest: VersionManifest, location: str) -> dict[str, Any]:
    """Return what status says of a version, or of a copy of it at this location."""
    return {
        "version": manifest.version,
        "digest": manifest.digest,
        "files": manifest.files,
        "bytes": manifest.size_bytes,
        "location": location,
    }


def _of_model(models: Models, model: str) -> dict[str, Any]:
    """Return what status says of a model. latest: 0 when it has no version any more."""
    newest, known = next(models.versions(model), None), models.numbers(model)
    return {
        "store": models.storage.location,
        "latest": newest.version if newest else 0,
        "versions": sum(1 for there in known.values() if there.manifest and there.tree),
        "aliases": dict([each for each in models.aliases(model).items() if each[1]][:ALIASES_MAX]),
    }


@contextmanager
def _place(request: Request, name: str) -> Iterator[tuple[Source, str]]:
    """Yield the place of the store, source or target, and its location: a mounted directory, or a bucket with the keys
    of a Secret."""
    place = request[name]
    location = str(place["location"]).rstrip("/")
    if "directory" in place:
        with located(str(place["directory"]), location) as directory:
            yield directory, location
        return
    spec = from_context({SPEC: json.dumps(place["spec"])})
    if isinstance(spec, Reference):
        raise InvalidManifest(f"{name}: is no place")
    yield source_of(spec, _secret(SECRETS / name)), location


def _secret(folder: Path) -> SecretManifest | None:
    """Return the Secret that is mounted at a folder; None when there is none. Errors: InvalidManifest."""
    if not folder.is_dir():
        return None
    try:
        values = {each.name: Secret(each.read_text()) for each in folder.iterdir() if not each.name.startswith("..")}
    except UnicodeDecodeError:
        raise InvalidManifest("the Secret holds what is no text") from None
    return for_storage(SecretManifest(name="of the Datastore", namespace="", values=values))


class _teller:  # noqa: N801  (used as a function)
    """Writes events to standard output: the first of each phase, and then at most one per TOLD_EVERY_S."""

    def __init__(self) -> None:
        self._last = ("", -TOLD_EVERY_S)

    def __call__(self, event: Event) -> None:
        phase, at = self._last
        now = time.monotonic()
        if event.phase != phase or now - at >= TOLD_EVERY_S:
            self._last = (event.phase, now)
            sys.stdout.write(json.dumps(event.to_json()) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
