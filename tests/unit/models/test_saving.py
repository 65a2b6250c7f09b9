"""datastore.models.saving: from a directory and from a bucket, into a directory and into a bucket."""

from __future__ import annotations

import io
import json
import os
import socket
import tarfile
import threading
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar

import pytest

from datastore.backends.s3copy import Limits
from datastore.errors import AlreadyExists, NotFound, ServerFault, StoreError, Unreachable
from datastore.fuse.store.base import ObjectStore, WriteOptions
from datastore.fuse.store.retrying import Retrier, RetryingStore
from datastore.models import objects as objects_module
from datastore.models import owner
from datastore.models.archives import open_tar
from datastore.models.directory import DirectoryStorage, DirectoryTree
from datastore.models.errors import SaveLost, SourceChanged, SourceInvalid, VersionDamaged
from datastore.models.exporting import export_directory
from datastore.models.manifest import Entry, Lineage
from datastore.models.objects import Objects, ObjectStorage, ObjectTree, Place
from datastore.models.opening import located, opened_tree
from datastore.models.progress import Event, Progress, Stopped
from datastore.models.registry import Models
from datastore.models.saving import Saved, Wish, save
from datastore.models.storage import CHUNK_BYTES, Document, Name, Node, Piece, Tree
from datastore.models.verifying import verify
from tests.memorystore import HookedStore
from tests.modelstores import PREFIX, Home, memory_home, tree_of, wish
from tests.promises import promise

T = TypeVar("T")


def saved(models: Models, source: Tree, asked: Wish | None = None) -> Saved:
    return save(models, source, asked or wish(), Progress())


def fill(home: Home, source: Path, path: str = "run") -> Tree:
    """The same directory where the home keeps data: in a directory, or as another client's objects."""
    if home.root is not None:
        (home.root / "data").mkdir(exist_ok=True)
        os.rename(source, home.root / "data" / path)
    else:
        models = home.models()
        first = saved(models, DirectoryTree(source), wish("seed"))
        tree = home.data(path)
        version = models.tree("seed", first.manifest.version)
        for node in version.scan():
            if node.kind == "file":
                piece = version.read(node, 0, node.size)
                with tree.write(node.path, piece.mode & 0o7777, node.size) as sink:
                    sink.write(piece.body)
            else:
                tree.make(Entry(node.path, node.kind, node.mode or 0, target=node.target), bare=True)
        models.delete("seed", 1)
    return home.data(path)


class TestWhatIsSaved:
    @promise("S-370", "S-372", "S-378")
    def test_everything_is_there_as_it_was(self, home: Home, source: Path, tmp_path: Path) -> None:
        models = home.models()
        asked = wish(labels={"stage": "test"}, lineage=Lineage(datastore="runs", path="7"))

        result = saved(models, DirectoryTree(source), asked)

        manifest = models.manifest("digits", 1)
        assert result == Saved(manifest, new=True)
        assert manifest.labels == {"stage": "test"}
        assert manifest.lineage == Lineage(datastore="runs", path="7", by="tester")
        assert (manifest.files, manifest.size_bytes) == (6, sum(entry.size for entry in manifest.entries))
        export_directory(models, "digits", 1, tmp_path / "out", Progress())
        assert tree_of(tmp_path / "out") == tree_of(source)

    @promise("S-370")
    def test_a_version_is_plain_files(self, home: Home, source: Path) -> None:
        """Who reads the store without us finds the files under their names."""
        saved(home.models(), DirectoryTree(source))
        for path in ("saved_model.pb", "variables/data", "n" * 255, "ümläut 漢字 +%"):
            assert home.get(f"digits/1/{path}") == (source / path).read_bytes()
        assert json.loads(home.get("digits/1.json"))["version"] == 1

    @promise("S-371")
    def test_the_digest_is_the_same_wherever_it_is_saved(self, home: Home, source: Path, tmp_path: Path) -> None:
        """From a directory, and from where the home keeps data."""
        first = saved(home.models(), DirectoryTree(source)).manifest
        again = saved(home.models(), fill(home, source), wish("other"))
        assert again.new
        assert again.manifest.digest == first.digest
        with memory_home() as elsewhere:
            assert saved(elsewhere.models(), home.data()).manifest.digest == first.digest

    @promise("S-372")
    def test_a_large_file_goes_in_parts(self, home: Home, tmp_path: Path) -> None:
        source = tmp_path / "large"
        source.mkdir()
        body = os.urandom(CHUNK_BYTES * 3 + 17)
        (source / "weights").write_bytes(body)
        models = home.models()

        saved(models, DirectoryTree(source))
        export_directory(models, "digits", 1, tmp_path / "out", Progress())

        assert (tmp_path / "out" / "weights").read_bytes() == body

    @promise("S-374")
    def test_the_same_bytes_make_no_second_version(self, home: Home, source: Path) -> None:
        models = home.models()
        first = saved(models, DirectoryTree(source))
        before = home.everything()

        again = saved(models, DirectoryTree(source))
        assert (again.new, again.manifest.version, again.manifest.digest) == (False, 1, first.manifest.digest)
        assert home.everything() == before

        forced = saved(models, DirectoryTree(source), wish(force=True))
        assert (forced.new, forced.manifest.version, forced.manifest.digest) == (True, 2, first.manifest.digest)
        (source / "saved_model.pb").chmod(0o600)
        assert saved(models, DirectoryTree(source)).manifest.version == 3

    @promise("S-374")
    def test_two_that_save_the_same_at_once_make_one_version(
        self, home: Home, source: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The second one began before the first one had made its version."""
        tree = DirectoryTree(source)
        real, others = tree.read, [home.models()]

        def read(node: Node, start: int, stop: int) -> Piece:
            if others:
                saved(others.pop(), DirectoryTree(source))
            return real(node, start, stop)

        monkeypatch.setattr(tree, "read", read)
        second = saved(home.models(), tree)
        assert not second.new
        assert [each.version for each in home.models().versions("digits")] == [second.manifest.version]
        assert [path for path in home.everything() if path.endswith(".saving")] == []

    @promise("S-374")
    def test_a_save_that_is_repeated_under_its_id_is_done_once(self, home: Home, source: Path) -> None:
        """The answer to the first one was lost, and others saved in between."""
        models = home.models()
        saved(models, DirectoryTree(source), wish(save_id="job-1"))
        (source / "more").write_bytes(b"")
        saved(models, DirectoryTree(source), wish(save_id="job-2"))

        again = saved(models, DirectoryTree(source), wish(save_id="job-1"))
        assert (again.new, again.manifest.version) == (False, 1)

    def test_a_repeated_save_removes_what_the_first_one_left_when_it_was_killed_after_its_commit(
        self, home: Home, source: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        models = home.models()
        with monkeypatch.context() as killed:
            killed.setattr(type(models.storage), "remove", lambda *_: None)
            saved(models, DirectoryTree(source), wish(save_id="job-1"))
        assert "digits/1.saving" in home.everything()

        assert not saved(models, DirectoryTree(source), wish(save_id="job-1")).new
        assert "digits/1.saving" not in home.everything()

    @promise("S-388")
    def test_progress_is_told_until_the_end(self, home: Home, source: Path) -> None:
        events: list[Event] = []
        save(home.models(), DirectoryTree(source), wish(), Progress(events.append))

        assert [event.phase for event in events][0::1] == sorted(
            (event.phase for event in events), key=["looking", "reading", "copying", "checking"].index
        )
        reading = [event for event in events if event.phase == "reading"]
        size = sum(each.stat().st_size for each in source.rglob("*") if each.is_file() and not each.is_symlink())
        assert (reading[-1].files, reading[-1].files_total) == (6, 6)
        assert (reading[-1].bytes, reading[-1].bytes_total) == (size, size)


class TestWhatIsRefused:
    def refused(self, home: Home, source: Tree, match: str, kind: type[Exception] = SourceInvalid) -> None:
        models = home.models()
        with pytest.raises(kind, match=match):
            saved(models, source)
        assert [path for path in home.everything() if path.startswith("digits/")] == []
        assert models.newest("digits") is None

    @promise("S-379")
    def test_files_that_no_version_can_hold_are_refused(self, home: Home, source: Path) -> None:
        """Named before anything is written."""
        os.mkfifo(source / "pipe")
        self.refused(home, DirectoryTree(source), "source/pipe: is a device, socket or FIFO")
        (source / "pipe").unlink()
        with socket.socket(socket.AF_UNIX) as listening:
            here = os.getcwd()
            os.chdir(source)
            listening.bind("s")
            os.chdir(here)
            self.refused(home, DirectoryTree(source), "source/s: is a device, socket or FIFO")
        (source / "s").unlink()
        (Path(os.fsdecode(os.fsencode(source) + b"/caf\xe9"))).write_bytes(b"")
        self.refused(home, DirectoryTree(source), "not UTF-8")

    @promise("S-379")
    def test_an_empty_or_missing_source_is_refused(self, home: Home, tmp_path: Path) -> None:
        (tmp_path / "empty").mkdir()
        self.refused(home, DirectoryTree(tmp_path / "empty"), "is empty")
        self.refused(home, DirectoryTree(tmp_path / "none"), "no such directory")
        (tmp_path / "file").write_bytes(b"x")
        self.refused(home, DirectoryTree(tmp_path / "file"), "file: is no directory; give the directory that it is in")
        self.refused(home, home.data("none"), "no such directory|is nothing")

    @promise("S-379")
    def test_links_that_leave_the_datastore_are_refused(self, home: Home, source: Path) -> None:
        """A version must not carry off what the Datastore does not hold."""
        secret = source.parent / "secret"
        secret.write_bytes(b"token")
        for target in ("../secret", str(secret)):
            (source / "out").symlink_to(target)
            self.refused(home, DirectoryTree(source, within=source), "source/out: is a symbolic link to")
            (source / "out").unlink()
        (source / "gone").symlink_to("../nowhere")
        self.refused(home, DirectoryTree(source, within=source.parent), "is no file of")

    @promise("S-379")
    def test_a_directory_that_becomes_a_link_while_it_is_read(self, home: Home, source: Path, tmp_path: Path) -> None:
        """What is outside is not read, whoever swaps a directory for a link to it."""
        outside = tmp_path / "outside"
        outside.mkdir()
        tree = DirectoryTree(source)
        nodes = {node.path: node for node in tree.scan()}
        os.rename(source / "variables", outside / "variables")
        (source / "variables").symlink_to(outside / "variables")

        with pytest.raises(SourceChanged, match="not inside"):
            tree.read(nodes["variables/data"], 0, 4)


class TestLinks:
    @promise("S-379")
    def test_a_link_to_a_file_of_the_datastore_is_saved_as_that_file(self, home: Home, source: Path) -> None:
        """A Hugging Face snapshot, whose files are links into blobs beside it."""
        blobs = source.parent / "hub" / "blobs"
        snapshot = source.parent / "hub" / "snapshots" / "abc"
        blobs.mkdir(parents=True)
        snapshot.mkdir(parents=True)
        (blobs / "123").write_bytes(b"weights")
        (snapshot / "model.safetensors").symlink_to("../../blobs/123")
        (snapshot / "same").symlink_to("model.safetensors")
        models = home.models()
        if home.root is not None:
            tree: Tree = DirectoryTree(snapshot, within=source.parent)
        else:
            fill(home, source.parent / "hub", "hub")
            tree = ObjectTree(home.objects("data"), "hub/snapshots/abc/", within="")

        manifest = saved(models, tree).manifest

        kinds = {entry.path: (entry.kind, entry.target) for entry in manifest.entries}
        assert kinds == {"model.safetensors": ("file", ""), "same": ("symlink", "model.safetensors")}
        assert home.get("digits/1/model.safetensors") == b"weights"

    @promise("S-378")
    def test_a_link_of_s3fs_is_a_link(self, bucket: Home) -> None:
        """Its target is the content of an object that only its metadata shows to be a link."""
        store = bucket.objects("data").store
        store.put("run/real", b"x", WriteOptions())
        store.put("run/link", b"real", WriteOptions(metadata={"mode": str(0o120777)}))

        entries = saved(bucket.models(), bucket.data()).manifest.entries
        assert {entry.path: entry.kind for entry in entries} == {"link": "symlink", "real": "file"}

    @promise("S-379")
    def test_objects_that_are_no_directory_tree_are_refused(self, bucket: Home) -> None:
        store = bucket.objects("data").store
        store.put("run/a", b"x", WriteOptions())
        store.put("run/a/b", b"x", WriteOptions())
        with pytest.raises(SourceInvalid, match="run/a: is there as a file and as a link or directory"):
            saved(bucket.models(), bucket.data())

    def test_our_own_marker_objects_are_not_saved(self, bucket: Home) -> None:
        store = bucket.objects("data").store
        store.put(".datastore.owner", b"{}", WriteOptions())
        store.put("a", b"x", WriteOptions())
        tree = ObjectTree(bucket.objects("data"), "", within="")
        assert [entry.path for entry in saved(bucket.models(), tree).manifest.entries] == ["a"]


class TestChanges:
    @promise("S-375")
    @pytest.mark.parametrize("what", ["content", "new", "gone", "mode", "link"])
    def test_a_change_while_it_is_saved_fails_the_save(
        self, home: Home, source: Path, what: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Of files that were read already, too."""
        models = home.models()
        tree = DirectoryTree(source)
        real, done = tree.read, threading.Event()

        def read(node: object, start: int, stop: int) -> Piece:
            piece = real(node, start, stop)  # type: ignore[arg-type]
            if not done.is_set() and getattr(node, "path", "") == "saved_model.pb":
                done.set()
                if what == "content":
                    (source / "run.sh").write_bytes(b"#!/bin/zs\n")
                elif what == "new":
                    (source / "new").write_bytes(b"")
                elif what == "gone":
                    (source / "run.sh").unlink()
                elif what == "mode":
                    (source / "run.sh").chmod(0o700)
                else:
                    (source / "latest").unlink()
                    (source / "latest").symlink_to("elsewhere")
            return piece

        monkeypatch.setattr(tree, "read", read)
        with pytest.raises(SourceChanged, match=r"run\.sh|new|latest"):
            saved(models, tree)
        assert [path for path in home.everything() if path.startswith("digits/")] == []
        monkeypatch.undo()
        assert saved(models, DirectoryTree(source)).manifest.version == 1

    @promise("S-375")
    def test_an_object_that_changes_between_the_read_and_the_copy(self, bucket: Home, source: Path) -> None:
        """The server copies only the state that was read."""
        tree = fill(bucket, source)
        models = bucket.models()
        store = bucket.objects("data").store

        class Changing(HookedStore):
            async def around(self, method: str, call: Callable[[], Coroutine[Any, Any, T]]) -> T:
                if method == "copy":
                    store.put("run/saved_model.pb", b"other", WriteOptions())
                return await call()

        models = Models(bucket.storage(Changing), who="tester")
        with pytest.raises(SourceChanged, match=r"run/saved_model\.pb"):
            saved(models, tree)
        assert models.newest("digits") is None


class TestBytesMoveOnce:
    @promise("S-372")
    def test_on_one_endpoint_nothing_is_uploaded(self, bucket: Home, source: Path) -> None:
        """Every byte is read once, and the server makes the copies."""
        tree = fill(bucket, source)
        assert isinstance(tree, ObjectTree)
        models = bucket.models()
        storage = models.storage
        saved(models, tree)

        assert isinstance(storage, objects_module.ObjectStorage)
        into = storage._objects.metrics.snapshot()
        manifest = models.manifest("digits", 1)
        assert into["copy"]["calls"] >= 6
        assert into["put"]["sent_bytes"] < 4096, "documents, links and markers"
        assert "upload_part" not in into
        read = tree._objects.metrics.snapshot()["get"]
        targets = sum(len(entry.target) for entry in manifest.entries)
        assert read["received_bytes"] == manifest.size_bytes + 2 * targets, "targets of links are looked at twice"

    @promise("S-374")
    def test_the_same_bytes_are_not_even_copied(self, bucket: Home, source: Path) -> None:
        tree = fill(bucket, source)
        saved(bucket.models(), tree)
        models = bucket.models()

        assert not saved(models, tree).new
        assert isinstance(models.storage, objects_module.ObjectStorage)
        assert "copy" not in models.storage._objects.metrics.snapshot()

    @promise("S-372")
    def test_a_changed_file_is_copied_whole(self, bucket: Home, source: Path, tmp_path: Path) -> None:
        """Those that waited because everything was as before are copied in the end."""
        tree = fill(bucket, source)
        models = bucket.models()
        saved(models, tree)
        bucket.objects("data").store.put("run/run.sh", b"#!/bin/zs\n", WriteOptions(metadata={"mode": str(0o100755)}))

        assert saved(models, tree).manifest.version == 2
        export_directory(models, "digits", 2, tmp_path / "out", Progress())
        assert (tmp_path / "out" / "run.sh").read_bytes() == b"#!/bin/zs\n"

    @promise("S-372")
    def test_keys_that_do_not_reach_the_source_make_it_go_through_here(
        self, bucket: Home, source: Path, tmp_path: Path
    ) -> None:
        from datastore.errors import AccessDenied

        class Narrow(HookedStore):
            async def around(self, method: str, call: Callable[[], Coroutine[Any, Any, T]]) -> T:
                if method in ("copy", "upload_part_copy"):
                    raise AccessDenied("these keys don't open the other bucket")
                return await call()

        tree = fill(bucket, source)
        expected = tree.scan()
        models = Models(bucket.storage(Narrow), who="tester")
        saved(models, tree)
        assert [node.path for node in models.tree("digits", 1).scan()] == [node.path for node in expected]

    @promise("S-372")
    def test_a_large_object_is_copied_in_parts(self, bucket: Home, monkeypatch: pytest.MonkeyPatch) -> None:
        body = os.urandom(12 << 20)
        bucket.objects("data").store.put("run/weights", body, WriteOptions())
        small = Limits(whole=5 << 20, part=5 << 20)
        monkeypatch.setattr(objects_module.Objects.__init__, "__kwdefaults__", {"copy_limits": small})
        saved(bucket.models(), bucket.data())
        assert bucket.get("digits/1/weights") == body


class Failing(HookedStore):
    """The write after n of them fails."""

    def __init__(self, inner: object, after: int) -> None:
        super().__init__(inner)  # type: ignore[arg-type]
        self.after = after
        self.lock = threading.Lock()

    async def around(self, method: str, call: Callable[[], Coroutine[Any, Any, T]]) -> T:
        if method in ("put", "upload_part", "copy"):
            with self.lock:
                self.after -= 1
            if self.after == -1:
                raise ServerFault("broken")
        return await call()


class Gone(HookedStore):
    """Nothing is answered from the first part of a file on."""

    def __init__(self, inner: ObjectStore) -> None:
        super().__init__(inner)
        self.refused: Counter[str] = Counter()

    async def around(self, method: str, call: Callable[[], Coroutine[Any, Any, T]]) -> T:
        if self.refused or method == "upload_part":
            self.refused[method] += 1
            raise Unreachable("nothing listens there")
        return await call()


class TestInterruptions:
    @promise("S-377")
    def test_after_an_outage_the_next_save_goes_on(
        self, bucket: Home, source: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What had arrived is taken over by a copy on the server, and is not read again."""
        (source / "weights").write_bytes(os.urandom(100_000))
        failing = Models(bucket.storage(lambda store: Failing(store, 6)), who="tester")
        with pytest.raises(ServerFault):
            saved(failing, DirectoryTree(source))
        assert bucket.models().newest("digits") is None
        assert any(path.startswith("digits/1/") for path in bucket.everything())
        tree = DirectoryTree(source)
        read: list[str] = []
        real = tree.read

        def counted(node: Node, start: int, stop: int) -> Piece:
            read.append(node.path)
            return real(node, start, stop)

        monkeypatch.setattr(tree, "read", counted)

        result = saved(bucket.models(), tree)

        assert (result.manifest.version, result.new) == (2, True)
        assert result.resumed_files >= 1
        assert len(read) == result.manifest.files - result.resumed_files
        assert [path for path in bucket.everything() if path.startswith("digits/1")] == ["digits/1.json"]

    def test_an_unreachable_server_is_waited_for_once(self, bucket: Home, tmp_path: Path) -> None:
        """Not anew for each clean-up: the save ended after four times as long."""
        assert bucket.stores is not None
        (tmp_path / "weights").write_bytes(bytes(20 << 20))
        gone = Gone(bucket.stores("models"))
        store = RetryingStore(gone, Retrier(budget_s=0.5, first_delay_s=0.01))
        objects = Objects(store, Place("memory", "models"), store.metrics)
        with closing(objects), pytest.raises(Unreachable):
            saved(Models(ObjectStorage(objects, PREFIX), who="tester"), DirectoryTree(tmp_path))
        assert gone.refused["upload_part"] > 3, "the part was tried again"
        assert (gone.refused["abort_upload"], gone.refused["put"]) == (1, 1)

    @promise("S-377", "S-388")
    def test_sigterm_leaves_what_is_done_for_the_retry(self, home: Home, source: Path, tmp_path: Path) -> None:
        """As when a pod is evicted; the retry takes it over and leaves nothing behind."""
        models = home.models()
        progress = stop_after(3, resume=True)
        with pytest.raises(Stopped):
            save(models, DirectoryTree(source), wish(save_id="job"), progress)
        assert models.newest("digits") is None

        result = saved(home.models(), DirectoryTree(source), wish(save_id="job"))

        assert result.new
        assert result.resumed_files >= 1
        number = result.manifest.version
        left = [path for path in home.everything() if path.startswith("digits/") and f"/{number}/" not in path]
        assert left == [f"digits/{each}.json" for each in range(1, number + 1)]
        export_directory(models, "digits", number, tmp_path / "out", Progress())
        assert tree_of(tmp_path / "out") == tree_of(source)

    @promise("S-377")
    def test_a_save_goes_on_although_its_source_is_mounted_elsewhere_now(self, home: Home, source: Path) -> None:
        """As each command mounts NFS and SFTP at a new directory: what counts is where the data is."""
        for again in (False, True):
            place = source.rename(source.with_name(f"mounted-{again}"))
            with (
                located(str(place), "sftp://host/runs") as mounted,
                opened_tree(mounted, "", "sftp://host/runs") as tree,
            ):
                if not again:
                    with pytest.raises(Stopped):
                        save(home.models(), tree, wish(), stop_after(3, resume=True))
                else:
                    assert saved(home.models(), tree).resumed_files >= 1
            place.rename(source)

    @promise("S-377")
    def test_a_file_that_changed_meanwhile_is_read_again(self, home: Home, source: Path) -> None:
        models = home.models()
        with pytest.raises(Stopped):
            save(models, DirectoryTree(source), wish(save_id="job"), stop_after(5, resume=True))
        for each in source.rglob("*"):
            if each.is_file() and not each.is_symlink():
                each.write_bytes(b"changed")

        result = saved(models, DirectoryTree(source), wish(save_id="job"))
        assert result.resumed_files == 0
        assert home.get(f"digits/{result.manifest.version}/saved_model.pb") == b"changed"

    @promise("S-377")
    @pytest.mark.parametrize("replaced", [False, True])
    @pytest.mark.parametrize("ending", ["tar", "tar.gz"])
    def test_an_interrupted_import_continues_only_with_the_same_archive(
        self, home: Home, tmp_path: Path, ending: str, replaced: bool
    ) -> None:
        """The other one has files of the same names at the same offsets, but with other bytes, and the last shorter."""
        first, place = archive(tmp_path / f"first.{ending}", b"1", 100), tmp_path / f"x.{ending}"
        first.rename(place)
        with open_tar(place) as tree, pytest.raises(Stopped):
            save(home.models(), tree, wish(save_id="job"), stop_after(3, resume=True))
        if replaced:
            archive(tmp_path / f"second.{ending}", b"2", 50).rename(place)
        with open_tar(place) as tree:
            result = save(home.models(), tree, wish(save_id="job"), Progress())

        assert result.resumed_files == (0 if replaced else 3)
        found = [home.get(f"digits/{result.manifest.version}/{name}") for name in "abc"]
        assert found == ([b"2" * 100, b"2" * 100, b"2" * 50] if replaced else [b"1" * 100] * 3)

    @promise("S-373")
    def test_a_version_that_a_mount_does_not_show_yet_is_left_alone(self, tmp_path: Path, source: Path) -> None:
        """For a second it may show the store as it was; the save fails, and repeated it makes the next version."""

        class Late(DirectoryStorage):
            def names(self, path: str) -> list[Name]:
                return []

            def read(self, path: str, limit: int | None = None) -> Document:
                if path == "digits/1.json":
                    raise NotFound(path)
                return super().read(path, limit)

        models = Models(DirectoryStorage(tmp_path))
        saved(models, DirectoryTree(source))
        (source / "more").write_bytes(b"more")
        with pytest.raises(AlreadyExists):
            saved(Models(Late(tmp_path)), DirectoryTree(source))
        assert verify(models, "digits", 1, Progress())[1] == []
        assert saved(models, DirectoryTree(source)).manifest.version == 2

    @promise("S-388")
    def test_ctrl_c_leaves_nothing(self, home: Home, source: Path) -> None:
        models = home.models()
        with pytest.raises(Stopped):
            save(models, DirectoryTree(source), wish(), stop_after(3, resume=False))
        assert [path for path in home.everything() if path.startswith("digits/")] == []
        assert saved(models, DirectoryTree(source)).manifest.version == 1

    @promise("S-376")
    def test_a_save_that_was_taken_for_dead_ends(self, home: Home, source: Path) -> None:
        """Gc elsewhere gave it up while it slept; it says so, and leaves nothing."""
        models = home.models()
        tree = DirectoryTree(source)
        real = tree.scan
        scans: list[int] = []

        def scan() -> object:
            scans.append(1)
            if len(scans) == 2:  # everything is read
                other = home.models()
                for garbage in list(other.garbage("digits", stale_s=-1)):
                    other.remove_garbage(garbage)
            return real()

        tree.scan = scan  # type: ignore[method-assign,assignment]
        with pytest.raises((SaveLost, VersionDamaged, StoreError)):
            saved(models, tree)
        assert [path for path in home.everything() if path.startswith("digits/")] == ["digits/1.json"]
        assert saved(models, DirectoryTree(source)).manifest.version == 2

    @promise("S-382")
    def test_a_running_save_renews_its_sign_of_life(
        self, home: Home, source: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Gc sees how long it was silent, not how long it lasts."""
        models = home.models()
        tree = DirectoryTree(source)
        real = tree.scan
        calls: list[int] = []

        def scan() -> object:
            calls.append(1)
            if len(calls) == 2:
                saving = next(models.savings("digits"))
                deadline = threading.Event()
                while not next(models.savings("digits")).done and not deadline.wait(0.02):
                    pass
                assert next(models.savings("digits")).tag != saving.tag or saving.done
            return real()

        monkeypatch.setattr(tree, "scan", scan)
        assert saved(models, tree, wish(beat_s=0.02)).new

    @promise("S-382")
    def test_another_machines_save_is_dead_only_after_its_silence(
        self, home: Home, source: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(owner, "identity", lambda: {"host": "other", "kernel": "another", "process": "1:1"})
        models = home.models()
        models.reserve("digits", "x", "somewhere")
        assert list(models.garbage("digits")) == []
        assert len(list(models.garbage("digits", stale_s=-1))) == 1


def archive(place: Path, fill: bytes, last: int) -> Path:
    """A tar file of two files with 100 bytes, one with `last`, and a link, before which a save can still be stopped."""
    with tarfile.open(place, "w:gz" if place.suffix == ".gz" else "w") as made:
        for name, size in {"a": 100, "b": 100, "c": last}.items():
            member = tarfile.TarInfo(name)
            member.size = size
            made.addfile(member, io.BytesIO(fill * size))
        member = tarfile.TarInfo("link")
        member.type, member.linkname = tarfile.SYMTYPE, "a"
        made.addfile(member)
    return place


def stop_after(files: int, *, resume: bool) -> Progress:
    """Progress that stops the work when so many files are done, one after the other."""

    class Stopping(Progress):
        seen = 0

        def count(self, files_done: int, size_bytes: int) -> None:
            super().count(files_done, size_bytes)
            Stopping.seen += files_done
            if Stopping.seen >= files:
                self.stop(resume=resume)

    return Stopping()


@pytest.fixture(autouse=True)
def one_file_at_a_time(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it matters how many files are done when something happens."""
    if "TestInterruptions" in request.node.nodeid:
        monkeypatch.setattr("datastore.models.transfer.FILES_AT_ONCE", 1)


@promise("S-385")
def test_an_archive_that_is_not_what_it_says_is_not_saved(home: Home, source: Path, tmp_path: Path) -> None:
    from datastore.models.exporting import export_tar

    models = home.models()
    saved(models, DirectoryTree(source))
    with (tmp_path / "a.tar").open("wb") as out:
        export_tar(models, "digits", 1, out, Progress())
    body = bytearray((tmp_path / "a.tar").read_bytes())
    body[body.index(b"graph 0")] ^= 1
    (tmp_path / "a.tar").write_bytes(body)

    with open_tar(tmp_path / "a.tar") as archive:
        archive.scan()
        with pytest.raises(VersionDamaged, match=r"says the digest sha256:\w+, and has sha256:\w+"):
            saved(models, archive, wish("copy", digest=archive.said.digest))  # type: ignore[arg-type]
    assert models.newest("copy") is None
