"""Save a directory as the next version of a model.

    reserve a number -> read every file once, for its digest -> all is as in the newest version: nothing is saved
                                                             -> else commit: the manifest is created

On one S3 endpoint the server copies each file after it was read, and only the state that was read (If-Match); otherwise
the bytes go to the store as they are read. Files that an interrupted save of the same source finished are taken over. A
save that ends early makes no version, and its number is given out again only if no write of it can still take effect.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from datastore.errors import NotFound, StoreError
from datastore.models.errors import ModelError, ModelNotFound, SourceChanged, SourceInvalid, VersionDamaged
from datastore.models.manifest import Entry, Lineage, VersionManifest, check_entries, digest_of, of_entries
from datastore.models.names import check_model
from datastore.models.progress import Progress, can_resume
from datastore.models.registry import BEAT_S, STALE_S, Models, Saving
from datastore.models.storage import Node, ReadableTree, Tree, leads_out
from datastore.models.transfer import Moved, Transfer
from datastore.retry import tried_once

_RECENT = 20
"""Among how many of the newest versions a repeated save looks for its own."""


class Saved(NamedTuple):
    """The result of a save. new: False when the newest version has the same bytes, or the same save made it earlier."""

    manifest: VersionManifest
    new: bool
    resumed_files: int = 0
    """How many files were taken over from interrupted saves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What is to be saved, besides the bytes. save_id: a save that is repeated under the same id is done once."""

    model: str
    lineage: Lineage = field(default_factory=Lineage)
    labels: Mapping[str, str] | None = None
    force: bool = False
    save_id: str = ""
    digest: str = ""
    """The digest that the source says it has; '' when the source says nothing."""
    beat_s: float = BEAT_S
    stale_s: float = STALE_S


class _Done(NamedTuple):
    """What an interrupted save had done for one file."""

    entry: Entry
    state: str
    """The state of the file's copy; '' when no copy was made."""
    tree: Tree


def save(models: Models, source: ReadableTree, wish: Wish, progress: Progress) -> Saved:
    """Save a version. Errors: SourceChanged, SourceInvalid, VersionDamaged, SaveLost, StoreError; then none is made."""
    models.check()
    repeated = _saved_before(models, wish)
    # A save that was killed after its commit may have left its `.saving` document.
    saved = _saved(models, source, wish, progress) if repeated is None else Saved(repeated, new=False)
    with contextlib.suppress(StoreError):  # `gc` removes garbage as well
        for garbage in models.garbage(wish.model, wish.stale_s):
            models.remove_garbage(garbage)
    return saved


def _saved(models: Models, source: ReadableTree, wish: Wish, progress: Progress) -> Saved:
    """Save under a newly reserved number."""
    progress.begin("looking")
    nodes = _scan(source)
    saving = models.reserve(check_model(wish.model), wish.save_id or secrets.token_hex(8), source.location)
    attempt = _Attempt(models, source, wish, progress, saving, nodes)
    try:
        with attempt.beating():
            return attempt.run()
    except BaseException as error:
        attempt.end(error)
        raise


class _Waiting:
    """Files not copied yet, because everything read so far is as in the newest version. Any thread may use this."""

    def __init__(self, newest: VersionManifest | None, nodes: Sequence[Node]) -> None:
        entries = () if newest is None else newest.entries
        before = {(entry.path, entry.kind, entry.size, entry.target) for entry in entries}
        after = {(node.path, node.kind, node.size if node.kind == "file" else 0, node.target) for node in nodes}
        self.files: list[Moved] = []
        self._same = set(entries) if before == after else set()
        self._lock = threading.Lock()

    def takes(self, moved: Moved) -> bool:
        """Make a file wait; return False for the first file that differs, and for all later files, which don't wait."""
        with self._lock:
            if moved.entry not in self._same:
                self._same = set()
                return False
            self.files.append(moved)
            return True


class _Attempt:
    """One save under the number that it reserved."""

    def __init__(
        self, models: Models, source: ReadableTree, wish: Wish, progress: Progress, saving: Saving, nodes: list[Node]
    ) -> None:
        self._models = models
        self._source = source
        self._wish = wish
        self._progress = progress
        self._saving = saving
        self._nodes = nodes
        self._target = models.tree(saving.model, saving.number)
        self._wrote = False
        self._lock = threading.Lock()
        self._done: dict[str, dict[str, Any]] = {}
        self._resumed = 0

    def run(self) -> Saved:
        """Do the save, from the first byte to the commit."""
        files = [node for node in self._nodes if node.kind == "file"]
        others = [_entry_of(node) for node in self._nodes if node.kind != "file"]
        largest = max(files, key=lambda node: node.size, default=None)
        by_server = largest is not None and self._target.reaches(self._source, largest)
        known = self._taken_over()
        before = self._newest()
        waiting = _Waiting(before, self._nodes)
        with Transfer(self._progress) as transfer:
            self._progress.begin("reading", len(files), sum(node.size for node in files))
            if by_server:
                moved = transfer.each(files, lambda node: self._read_and_copy(transfer, node, known, waiting))
            else:
                self._begin(others)
                moved = transfer.each(files, lambda node: self._read_into(transfer, node, known))
            entries = sorted([*others, *(each.entry for each in moved)])
            digest = digest_of(entries)
            self._refuse_changes()
            if self._wish.digest and self._wish.digest != digest:
                raise VersionDamaged(f"{self._source.location}: says the digest {self._wish.digest}, and has {digest}")
            if (same := self._newest(digest)) is not None:
                self._models.withdraw(self._saving, wrote=self._wrote)
                return Saved(same, new=False, resumed_files=self._resumed)
            if by_server:
                self._begin(others)
                left = {moved.node.path: moved for moved in waiting.files}
                transfer.each(
                    [moved.node for moved in left.values()], lambda node: self._copy(transfer, left[node.path])
                )
            self._make(entries if by_server else others, "symlink")
        self._progress.begin("checking")
        self._target.settle(entries)
        manifest = of_entries(
            self._saving.model,
            self._saving.number,
            entries,
            saved=self._models.time(),
            save_id=self._saving.save_id,
            labels=self._wish.labels,
            lineage=replace(self._wish.lineage, by=self._wish.lineage.by or self._models.who),
        )
        self._models.commit(self._saving, manifest)
        return Saved(manifest, new=True, resumed_files=self._resumed)

    def end(self, error: BaseException) -> None:
        """Clean up after a failure: leave what a repeated save can take over, or nothing."""
        with contextlib.suppress(StoreError):
            if can_resume(error) and self._wrote:
                self._saving.state = "stopped"
                with tried_once():
                    self._tell()
            else:
                self._models.withdraw(self._saving, wrote=self._wrote)

    @contextlib.contextmanager
    def beating(self) -> Iterator[None]:
        """Renew the save's document with its progress, every `beat_s`; stop the save when it was considered dead."""
        ended = threading.Event()

        def beat() -> None:
            while not ended.wait(self._wish.beat_s):
                try:
                    self._tell()
                except StoreError:
                    continue  # the next beat, or the save itself, meets the same error
                except ModelError as error:
                    self._progress.fail(error)
                    return

        thread = threading.Thread(target=beat, name="save-beat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def _tell(self) -> None:
        with self._lock:
            self._saving.done = list(self._done.values())
        self._models.renew(self._saving)

    def _taken_over(self) -> dict[tuple[str, str], _Done]:
        """Give up the dead saves of the same source; return what they had done, by path and state in the source."""
        known: dict[tuple[str, str], _Done] = {}
        for other in self._models.savings(self._saving.model):
            same = other.number != self._saving.number and other.source == self._saving.source
            if not same or not (other.save_id == self._wish.save_id or self._models.is_dead(other, self._wish.stale_s)):
                continue
            if not self._models.give_up(other):
                continue
            tree = self._models.tree(other.model, other.number)
            for said in other.done:
                with contextlib.suppress(KeyError, TypeError, ValueError):
                    entry = Entry(str(said["path"]), "file", int(said["mode"]), int(said["size"]), str(said["sha256"]))
                    known[entry.path, str(said["from"])] = _Done(entry, str(said["state"]), tree)
        return known

    def _newest(self, digest: str = "") -> VersionManifest | None:
        """Return the newest version, which this save may equal; with a digest, only if the version has that. None when
        there is nothing to compare with."""
        try:
            head = None if self._wish.force else self._models.newest(self._saving.model)
            if head is None or digest not in ("", head.digest):
                return None
            return self._models.manifest(head.model, head.version)
        except (ModelNotFound, VersionDamaged):  # just deleted, or damaged, so useless for a comparison
            return None

    def _read_into(self, transfer: Transfer, node: Node, known: Mapping[tuple[str, str], _Done]) -> Moved:
        """Read a file and write it to the store, or take it over from an interrupted save."""
        before = known.get((node.path, node.state)) if node.state else None
        if before is not None and before.state:
            state = self._target.adopt(before.tree, before.entry, before.state)
            if state is not None:
                return self._remember(self._taken(node, before, state))
        return self._remember(transfer.move(self._source, node, self._target))

    def _read_and_copy(
        self,
        transfer: Transfer,
        node: Node,
        known: Mapping[tuple[str, str], _Done],
        waiting: _Waiting,
    ) -> Moved:
        """Read a file for its digest and let the server copy it, unless it waits (see _Waiting)."""
        before = known.get((node.path, node.state)) if node.state else None
        moved = self._taken(node, before, "") if before else transfer.move(self._source, node, None)
        self._remember(moved)
        if not waiting.takes(moved):
            self._copy(transfer, moved)
        return moved

    def _taken(self, node: Node, before: _Done, state: str) -> Moved:
        self._progress.count(1, node.size)
        with self._lock:
            self._resumed += 1
        return Moved(node, before.entry, state)

    def _copy(self, transfer: Transfer, moved: Moved) -> None:
        node, entry = moved.node, moved.entry
        if entry.kind == "symlink":
            return
        self._progress.check()
        self._wrote = True
        state = self._target.copy(self._source, node, entry.path, entry.mode)
        if state is None:  # the server can't copy after all
            self._remember(transfer.move(self._source, node, self._target))
        else:
            self._remember(Moved(node, entry, state))

    def _remember(self, moved: Moved) -> Moved:
        if moved.entry.kind == "file":
            entry = moved.entry
            said = {"path": entry.path, "mode": entry.mode, "size": entry.size, "sha256": entry.sha256}
            with self._lock:
                self._done[entry.path] = {**said, "from": moved.node.state, "state": moved.state}
        return moved

    def _begin(self, others: Sequence[Entry]) -> None:
        self._target.begin()
        self._wrote = True
        self._make(others, "directory")

    def _make(self, entries: Sequence[Entry], kind: str) -> None:
        filled = {node.path.rpartition("/")[0] for node in self._nodes}
        for entry in entries:
            if entry.kind == kind:
                self._progress.check()
                self._wrote = True
                self._target.make(entry, bare=entry.path not in filled)

    def _refuse_changes(self) -> None:
        before = {node.path: node for node in self._nodes}
        after = {node.path: node for node in self._source.scan()}
        for path in sorted(before.keys() | after.keys()):
            if before.get(path) == after.get(path):
                continue
            if f"{self._models.storage.location.rstrip('/')}/".startswith(f"{self._source.location}/"):
                raise SourceInvalid(
                    f"{self._source.location}: holds the store of models itself, which each save changes; save a "
                    "directory beside the models"
                )
            what = "came" if path not in before else "went away" if path not in after else "changed"
            raise SourceChanged(
                f"{self._source.location}/{path}: {what} while it was saved, so nothing was; save it again when nobody "
                "writes there"
            )


def _scan(source: ReadableTree) -> list[Node]:
    try:
        nodes = sorted(source.scan(), key=lambda node: node.path)
    except NotFound as error:
        raise SourceInvalid(str(error)) from error
    if not nodes:
        raise SourceInvalid(f"{source.location}: is empty, there is nothing to save")
    try:
        check_entries([_entry_of(node) for node in nodes])
    except ValueError as error:
        raise SourceInvalid(f"{source.location}: {error}") from None
    links = {node.path: node.target for node in nodes if node.kind == "symlink"}
    if path := leads_out(links):
        raise SourceInvalid(
            f"{source.location}: {path} is a symbolic link to {links[path]}, which leads out of what is saved; a "
            "version must hold all that it needs, so put the file there or remove the link"
        )
    return nodes


def _entry_of(node: Node) -> Entry:
    """Return what is known of an entry before its file is read."""
    return Entry(node.path, node.kind, node.mode or 0, target=node.target)


def _saved_before(models: Models, wish: Wish) -> VersionManifest | None:
    """Return the version that an earlier attempt of this save made."""
    if not wish.save_id:
        return None
    for _, manifest in zip(range(_RECENT), models.versions(wish.model), strict=False):
        if manifest.save_id == wish.save_id:
            return manifest
    return None
