"""The models of one store: numbers, versions, aliases and uses of versions. Every change is to one document.

    NAME/7/             the files of version 7, as they were saved
    NAME/7.json         its manifest, created last: only the manifest makes the number a version
    NAME/7.saving       created first: reserves the number for one save of one process
    NAME/aliases/prod   the number that the alias means
    NAME/uses/7/ID      who serves version 7
    .datastore.models.json   in the root: the format of the store

A number that was given up or deleted has a manifest with "removed" under the name of the save's own manifest. So a save
that was considered dead can't become a version any more, and no two versions have the same number.
"""

from __future__ import annotations

import contextlib
import getpass
import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal, NamedTuple

from datastore.errors import AlreadyExists, InvalidRequest, NotFound, PreconditionFailed, StoreError, Unsupported
from datastore.models import owner
from datastore.models.errors import (
    FormatUnknown,
    ModelError,
    ModelNotFound,
    SaveLost,
    VersionDamaged,
    VersionInUse,
)
from datastore.models.manifest import HEAD_BYTES, Removed, VersionManifest, parse, parse_head
from datastore.models.names import Reference, check_alias, check_model, is_alias, is_model, version_number
from datastore.models.storage import Storage, Tag, Tree

LAYOUT = "datastore.dev/model-store/v1"
MARKER = ".datastore.models.json"
STALE_S = 900.0
"""A save on another machine is dead after this many seconds without a renewal; a live save renews every BEAT_S."""
BEAT_S = 30.0
_ATTEMPTS = 1000
"""The most attempts to find a free number; each save that began at the same moment costs one."""
_NOBODY = Tag("0" * 32)


class Number(NamedTuple):
    """Which files and directories one number of a model has."""

    manifest: bool = False
    saving: bool = False
    tree: bool = False


class Alias(NamedTuple):
    """The version that an alias means, and the state of the alias's document."""

    version: int
    tag: Tag


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """A Serving or process that serves a version, so that it isn't deleted. id: a Serving's UID, or a unique text."""

    id: str
    who: str
    """The name for people, such as 'Serving prod/digits'."""
    process: Mapping[str, str] = field(default_factory=dict)
    """From owner.identity(): the use ends when the process is seen to be dead. Empty: only remove_use() ends it."""


@dataclass(slots=True, kw_only=True)
class Saving:
    """A save that is not a version yet, as its document says. done: the files that another save may take over."""

    model: str
    number: int
    save_id: str
    source: str
    owner: dict[str, str]
    state: Literal["running", "stopped"] = "running"
    done: list[dict[str, Any]] = field(default_factory=list)
    tag: Tag = _NOBODY

    def body(self) -> bytes:
        """Return the content of the document."""
        said = {
            "save": self.save_id,
            "source": self.source,
            "state": self.state,
            "owner": self.owner,
            "done": self.done,
        }
        return json.dumps(said, separators=(",", ":")).encode()


@dataclass(frozen=True, slots=True, kw_only=True)
class Garbage:
    """A number that is not a version, but has something left in the store."""

    model: str
    number: int
    why: Literal["deleted", "unfinished"]


class Models:
    """The models of one store. who: the person or account that manifests name. now: gives seconds since the epoch."""

    def __init__(self, storage: Storage, *, who: str = "", now: Callable[[], float] = time.time) -> None:
        self.storage = storage
        self.who = who or _account()
        self._now = now

    def check(self) -> None:
        """Before the first write, try conditional writes on MARKER. Errors: Unsupported, saying what to use instead."""
        self.storage.check()
        body = json.dumps({"format": LAYOUT}).encode()
        try:
            self.storage.create(MARKER, body)
            self.storage.create(MARKER, body)
        except AlreadyExists:
            pass
        except (InvalidRequest, Unsupported) as error:
            raise self._no_conditions("create a file only where none is", error) from error
        else:
            raise self._no_conditions("create a file only where none is")
        try:
            self.storage.replace(MARKER, body, _NOBODY)
        except PreconditionFailed:
            pass
        except (InvalidRequest, Unsupported) as error:
            raise self._no_conditions("replace a file only in the state that was read", error) from error
        else:
            raise self._no_conditions("replace a file only in the state that was read")
        found = self.storage.read(MARKER).body
        if found == body:
            return
        if layout := _mapping(found).get("format"):
            raise Unsupported(
                f"{self._where(MARKER)}: says that the store has another layout than {LAYOUT}, which this release "
                f"writes: {str(layout)[:80]}; use the release that made the store"
            )
        raise Unsupported(
            f"{self._where(MARKER)}: is damaged, it does not say the layout of the store; if all of this store was "
            "saved by this release, remove that file, and the next save makes it again"
        )

    def names(self) -> list[str]:
        """Return the names of the models that have, had or will have a version."""
        return sorted(name for each, is_directory in self.storage.names("") if is_directory and is_model(name := each))

    def numbers(self, model: str) -> dict[int, Number]:
        """Return every number of a model of which something exists, in ascending order."""
        found: dict[int, Number] = {}
        for name, is_directory in self.storage.names(check_model(model)):
            stem, dot, ending = name.partition(".")
            number = version_number(stem)
            if number is None:
                continue
            present = found.get(number, Number())
            if is_directory and not dot:
                found[number] = present._replace(tree=True)
            elif not is_directory and ending == "json":
                found[number] = present._replace(manifest=True)
            elif not is_directory and ending == "saving":
                found[number] = present._replace(saving=True)
        return dict(sorted(found.items()))

    def manifest(self, model: str, number: int) -> VersionManifest:
        """Read a version's manifest with its entries. Errors: ModelNotFound, VersionDamaged."""
        path = _manifest_path(model, number)
        try:
            document = self.storage.read(path)
        except NotFound:
            raise self._no_version(model, number) from None
        found = parse(document.body, self._where(path))
        return self._checked(found, model, number)

    def head(self, model: str, number: int) -> VersionManifest:
        """Read the head of a version's manifest, which has no entries. Errors: ModelNotFound, VersionDamaged."""
        found = self._head(model, number)
        if found is None:
            raise self._no_version(model, number)
        return self._checked(found, model, number)

    def versions(self, model: str) -> Iterator[VersionManifest]:
        """Yield the heads of all versions, the newest first; of one whose manifest is damaged only the `damage`."""
        for number, there in sorted(self.numbers(model).items(), reverse=True):
            found = self._head(model, number) if there.manifest else None
            if found is not None and found.removed is None:
                yield found

    def newest(self, model: str) -> VersionManifest | None:
        """Return the head of the newest version; None when there is no version. Errors: VersionDamaged."""
        found = next(self.versions(model), None)
        return found and self._checked(found, model, found.version)

    def resolve(self, reference: Reference) -> int:
        """Return the version number that a reference means. Errors: ModelNotFound."""
        if reference.version is not None:
            return self.head(reference.model, reference.version).version
        if reference.alias is not None:
            alias = self.alias(reference.model, reference.alias)
            if alias is None:
                known = ", ".join(self.aliases(reference.model)) or "none"
                raise ModelNotFound(f"{reference.model} has no alias {reference.alias}; it has {known}")
            return self.head(reference.model, alias.version).version
        newest = self.newest(reference.model)
        if newest is None:
            raise ModelNotFound(f"{self.storage.location} has no version of a model {reference.model}")
        return newest.version

    def tree(self, model: str, number: int) -> Tree:
        """Return the tree of a version's files."""
        return self.storage.tree(f"{check_model(model)}/{number}")

    # Aliases

    def aliases(self, model: str) -> dict[str, int]:
        """Return the aliases of a model and the numbers that they mean; 0 for an alias that is damaged."""
        found = {}
        for name, is_directory in self.storage.names(f"{check_model(model)}/aliases"):
            if is_directory or not is_alias(name):
                continue
            try:
                alias = self.alias(model, name)
            except VersionDamaged:
                found[name] = 0
            else:
                if alias is not None:
                    found[name] = alias.version
        return dict(sorted(found.items()))

    def alias(self, model: str, name: str) -> Alias | None:
        """Read an alias; None when it does not exist. Errors: VersionDamaged when it holds no number."""
        path = f"{check_model(model)}/aliases/{check_alias(name)}"
        try:
            document = self.storage.read(path)
        except NotFound:
            return None
        number = version_number(document.body.decode("ascii", "replace").strip())
        if number is None:
            raise VersionDamaged(
                f"{self._where(path)}: holds no number; move the alias to the version that it is to mean, or remove it"
            )
        return Alias(number, document.tag)

    def set_alias(self, model: str, name: str, number: int, *, expected: int | None = None) -> int | None:
        """Move an alias to a version; return where it was. expected: where it must be now; 0: it must not exist.

        Errors: ModelNotFound; ModelError when the alias is elsewhere, or another writer moves it at the same time.
        """
        self.check()
        self.head(model, number)
        path = f"{model}/aliases/{check_alias(name)}"
        try:
            present = self.alias(model, name)
        except VersionDamaged:
            present = Alias(0, self.storage.read(path).tag)
        if expected is not None and expected != (present.version if present else 0):
            stands = f"is at {present.version}" if present else "does not exist"
            raise ModelError(f"the alias {name} of {model} {stands}, not at {expected}; it was left there")
        body = f"{number}\n".encode()
        try:
            tag = self.storage.replace(path, body, present.tag) if present else self.storage.create(path, body)
        except (AlreadyExists, PreconditionFailed):
            raise ModelError(
                f"the alias {name} of {model} was moved by somebody else in the meantime; check it, and repeat"
            ) from None
        try:
            self.head(model, number)  # a deletion looks for aliases after it has taken the version away
        except ModelNotFound:
            if present and present.version:
                self.storage.replace(path, f"{present.version}\n".encode(), tag)
            else:
                self.storage.remove(path)
            raise
        return present.version if present else None

    def remove_alias(self, model: str, name: str) -> None:
        """Remove an alias, also one that is damaged. Errors: ModelNotFound."""
        path = f"{check_model(model)}/aliases/{check_alias(name)}"
        try:
            self.storage.read(path)
        except NotFound:
            raise ModelNotFound(f"{model} has no alias {name}") from None
        self.storage.remove(path)

    # Uses: who serves a version

    def add_use(self, model: str, number: int, use: Use) -> None:
        """Record a use, so that the version can't be deleted from now on; idempotent. Errors: ModelNotFound."""
        path = f"{check_model(model)}/uses/{number}/{use.id}"
        with contextlib.suppress(AlreadyExists):
            self.storage.create(path, json.dumps({"who": use.who, "process": dict(use.process)}).encode())
        try:
            self.head(model, number)  # a deletion looks for uses after it has taken the version away
        except ModelNotFound:
            self.storage.remove(path)
            raise

    def remove_use(self, model: str, number: int, use_id: str) -> None:
        """Remove a use; idempotent."""
        self.storage.remove(f"{check_model(model)}/uses/{number}/{use_id}")

    def uses(self, model: str, number: int) -> list[Use]:
        """Return the uses of a version; those of dead processes of this machine are removed."""
        found = []
        for name, _ in self.storage.names(f"{check_model(model)}/uses/{number}"):
            try:
                said = _mapping(self.storage.read(f"{model}/uses/{number}/{name}").body)
            except NotFound:
                continue
            process = said.get("process")
            use = Use(id=name, who=str(said.get("who", name)), process=process if isinstance(process, dict) else {})
            if use.process and owner.is_dead(dict(use.process)):
                self.remove_use(model, number, name)
            else:
                found.append(use)
        return found

    # Saves

    def reserve(self, model: str, save_id: str, source: str) -> Saving:
        """Reserve a number that no version or other save has. Errors: StoreError; ModelError when none was found."""
        known = self.numbers(model)
        number = max(known, default=0)
        for _ in range(_ATTEMPTS):
            number += 1
            saving = Saving(model=model, number=number, save_id=save_id, source=source, owner=owner.identity())
            try:
                saving.tag = self.storage.create(_saving_path(model, number), saving.body())
            except AlreadyExists:
                continue
            if self._head(model, number) is None:
                return saving
            # The number became a version, or was given up, after the numbers were listed.
            self.storage.remove(_saving_path(model, number))
        raise ModelError(f"{model}: no free number was found in {_ATTEMPTS} attempts")

    def renew(self, saving: Saving) -> None:
        """Renew a save's document, with the progress so far. Errors: SaveLost when it was considered dead."""
        try:
            saving.tag = self.storage.replace(_saving_path(saving.model, saving.number), saving.body(), saving.tag)
        except PreconditionFailed:
            raise self._lost(saving) from None

    def commit(self, saving: Saving, manifest: VersionManifest) -> None:
        """Create the manifest, which makes the version. Errors: SaveLost when the save was considered dead."""
        path = _manifest_path(saving.model, saving.number)
        try:
            self.storage.create(path, manifest.text().encode())
        except AlreadyExists:
            raise self._lost(saving) from None
        with contextlib.suppress(StoreError):  # the number is a version already; garbage() removes the rest
            self.storage.remove(_saving_path(saving.model, saving.number))

    def withdraw(self, saving: Saving, *, wrote: bool) -> None:
        """Give up a number that this process reserved, when none of its requests is under way any more.

        The number may be reserved again, unless a write below it was not answered and may still take effect. wrote:
        whether this process wrote below it; else what is there belongs to another save that a mount did not show yet.
        """
        tree = self.tree(saving.model, saving.number)
        if tree.is_quiet():
            if wrote:
                tree.remove()
            self.storage.remove(_saving_path(saving.model, saving.number))
        else:
            self._clear(saving.model, saving.number)

    def savings(self, model: str) -> Iterator[Saving]:
        """Yield the saves that are not versions yet, whether they still run or not."""
        for number, there in self.numbers(model).items():
            if there.saving and (found := self._saving(model, number)) is not None:
                yield found

    def is_dead(self, saving: Saving, stale_s: float = STALE_S) -> bool:
        """Return whether a save is dead: it stopped, its process is dead, or it was not renewed for `stale_s`."""
        if saving.state == "stopped" or owner.is_dead(saving.owner):
            return True
        try:
            return self.storage.age_s(_saving_path(saving.model, saving.number)) > stale_s
        except NotFound:
            return False

    def give_up(self, saving: Saving) -> bool:
        """Make sure that a dead save never becomes a version; return False when it is one already."""
        return self._fence(saving.model, saving.number)

    # Removal

    def delete(self, model: str, number: int) -> int:
        """Delete a version, also a damaged one; return how many files went.

        Errors: ModelNotFound; VersionInUse, naming alias or user; FormatUnknown.
        """
        self._refuse_used(model, number)
        path = _manifest_path(model, number)
        try:
            document = self.storage.read(path)
        except NotFound:
            raise self._no_version(model, number) from None
        head = self._parsed(document.body[:HEAD_BYTES], model, number)
        if head.damage is None or isinstance(head.damage, FormatUnknown):
            self._checked(head, model, number)
        gone = self._gone(model, number, "deleted")
        try:
            tag = self.storage.replace(path, gone, document.tag)
        except PreconditionFailed:
            raise self._no_version(model, number) from None
        try:
            self._refuse_used(model, number)
        except VersionInUse:
            self.storage.replace(path, document.body, tag)
            raise
        return self.tree(model, number).remove()

    def garbage(self, model: str, stale_s: float = STALE_S) -> Iterator[Garbage]:
        """Yield what interrupted deletions and saves left; remove the `.saving` documents that versions still have.

        A number whose manifest is damaged is left as it is: its files may be all that is left of a version.
        """
        for number, there in self.numbers(model).items():
            if not (there.tree or there.saving):
                continue
            head = self._head(model, number)
            if head is not None and head.damage is not None:
                continue
            if head is not None and head.removed is not None:
                yield Garbage(model=model, number=number, why=head.removed.why)
            elif there.saving:
                saving = self._saving(model, number)
                if head is not None:  # only the save's own document is left
                    self.storage.remove(_saving_path(model, number))
                elif saving is not None and self.is_dead(saving, stale_s):
                    yield Garbage(model=model, number=number, why="unfinished")

    def remove_garbage(self, garbage: Garbage) -> int:
        """Remove what is left; return how many files and uploads went: 0 if the save has become a version after all."""
        return self._clear(garbage.model, garbage.number)

    def sweep(self, model: str) -> int:
        """Remove what interrupted writers of documents left, of MARKER too; return how many files went."""
        used = [f"{model}/uses/{number}" for number, _ in self.storage.names(f"{model}/uses")]
        return sum(self.storage.sweep(folder) for folder in ("", model, f"{model}/aliases", *used))

    def time(self) -> str:
        """Return the time now, in the format of manifests."""
        return datetime.fromtimestamp(self._now(), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")

    def _clear(self, model: str, number: int) -> int:
        """Fence a number, then remove its tree, and last its save's document, so that a repetition completes it."""
        if not self._fence(model, number):
            return 0
        removed = self.tree(model, number).remove()
        self.storage.remove(_saving_path(model, number))
        return removed

    def _fence(self, model: str, number: int) -> bool:
        """Keep a number from becoming a version, by a manifest with `removed`; return False when it is a version."""
        try:
            self.storage.create(_manifest_path(model, number), self._gone(model, number, "unfinished"))
        except AlreadyExists:
            head = self._head(model, number)
            return head is not None and head.removed is not None
        return True

    def _gone(self, model: str, number: int, why: Literal["deleted", "unfinished"]) -> bytes:
        removed = Removed(at=self.time(), by=self.who, why=why)
        manifest = VersionManifest(
            model=model, version=number, digest="", files=0, size_bytes=0, saved="", removed=removed
        )
        return manifest.text().encode()

    def _refuse_used(self, model: str, number: int) -> None:
        aliases = self.aliases(model)
        if damaged := [name for name, version in aliases.items() if not version]:
            raise VersionInUse(
                f"{model}:{number} is not deleted: the alias {', '.join(damaged)} is damaged and may have meant it; "
                "move or remove that first"
            )
        named = [name for name, version in aliases.items() if version == number]
        if named:
            raise VersionInUse(
                f"{model}:{number} is not deleted: the alias {', '.join(named)} means it; move or remove that first"
            )
        if uses := self.uses(model, number):
            raise VersionInUse(f"{model}:{number} is not deleted: it is served by {', '.join(use.who for use in uses)}")

    def _head(self, model: str, number: int) -> VersionManifest | None:
        """Read the head of a number's manifest, which may be damaged; None when there is none."""
        try:
            body = self.storage.read(_manifest_path(check_model(model), number), HEAD_BYTES).body
        except NotFound:
            return None
        return self._parsed(body, model, number)

    def _parsed(self, body: bytes, model: str, number: int) -> VersionManifest:
        """Return the head that a document has, or one that holds only the `damage`."""
        try:
            return self._own(parse_head(body, self._where(_manifest_path(model, number))), model, number)
        except VersionDamaged as damage:
            return VersionManifest(
                model=model, version=number, digest="", files=0, size_bytes=0, saved="", damage=damage
            )

    def _checked(self, found: VersionManifest, model: str, number: int) -> VersionManifest:
        if found.damage is not None:
            raise found.damage
        if found.removed is not None:
            raise ModelNotFound(
                f"{model}:{number} is no version: it was {_WHY[found.removed.why]} at {found.removed.at}"
            )
        return self._own(found, model, number)

    def _own(self, found: VersionManifest, model: str, number: int) -> VersionManifest:
        if (found.model, found.version) != (model, number):
            where = self._where(_manifest_path(model, number))
            raise VersionDamaged(
                f"{where}: is the manifest of {found.model}:{found.version}; delete {model}:{number}, or bring this "
                "file back from a copy"
            )
        return found

    def _saving(self, model: str, number: int) -> Saving | None:
        """Read a save's document; None when the save has just ended. A document without JSON has no owner."""
        try:
            document = self.storage.read(_saving_path(model, number))
        except NotFound:
            return None
        said = _mapping(document.body)
        who = said.get("owner")
        return Saving(
            model=model,
            number=number,
            save_id=str(said.get("save", "")),
            source=str(said.get("source", "")),
            owner={str(key): str(value) for key, value in who.items()} if isinstance(who, dict) else {},
            state="stopped" if said.get("state") == "stopped" else "running",
            done=[each for each in said.get("done", []) if isinstance(each, dict)],
            tag=document.tag,
        )

    def _lost(self, saving: Saving) -> SaveLost:
        return SaveLost(
            f"the save of {saving.model} as version {saving.number} was considered dead in the meantime; repeat it"
        )

    def _no_version(self, model: str, number: int) -> ModelNotFound:
        return ModelNotFound(f"{self.storage.location} has no version {number} of a model {model}")

    def _no_conditions(self, what: str, error: Exception | None = None) -> Unsupported:
        said = f" ({error})" if error else ""
        return Unsupported(
            f"{self.storage.location}: this server can't {what}{said}, so two saves could get one number; keep models "
            "on a server with conditional writes (AWS S3, MinIO, versitygw, ...), or in a directory"
        )

    def _where(self, path: str) -> str:
        return f"{self.storage.location.removesuffix('/')}/{path}"


_WHY: Mapping[str, str] = {"deleted": "deleted", "unfinished": "given up before it was finished,"}


def _manifest_path(model: str, number: int) -> str:
    return f"{model}/{number}.json"


def _saving_path(model: str, number: int) -> str:
    return f"{model}/{number}.saving"


def _mapping(body: bytes) -> dict[str, Any]:
    try:
        said = json.loads(body)
    except ValueError:
        return {}
    return said if isinstance(said, dict) else {}


def _account() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError, ImportError):
        return ""
