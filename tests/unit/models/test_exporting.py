"""Exports and imports, bit for bit: directory, bucket, tar and OCI layout; and malicious archives."""

from __future__ import annotations

import gzip
import hashlib
import io
import itertools
import json
import os
import subprocess
import tarfile
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext, suppress
from pathlib import Path

import pytest

from datastore.errors import AlreadyExists, NotFound, OutOfSpace
from datastore.models import exporting, owner
from datastore.models.archives import open_layout, open_tar
from datastore.models.directory import DirectoryStorage, DirectoryTree
from datastore.models.errors import ModelError, ModelNotFound, SourceInvalid, VersionDamaged
from datastore.models.exporting import export_directory, export_tar, export_tar_file, export_tree
from datastore.models.manifest import Entry
from datastore.models.ocilayout import DIGEST_LABEL, INDEX, MANIFEST, Layout, cut, export_layout
from datastore.models.progress import Event, Progress, Stopped
from datastore.models.registry import Models
from datastore.models.saving import save
from datastore.models.verifying import compared, verify
from tests.modelstores import Home, tree_of, wish
from tests.promises import promise


@pytest.fixture
def models(home: Home, source: Path) -> Models:
    """Return Models in which digits:1 was saved from the source."""
    models = home.models()
    save(models, DirectoryTree(source), wish(), Progress())
    return models


def tar_of(models: Models, place: Path) -> Path:
    with place.open("wb") as out:
        export_tar(models, "digits", 1, out, Progress())
    return place


class TestVerify:
    @promise("S-383")
    def test_a_version_is_as_it_was_saved(self, models: Models) -> None:
        manifest, damages = verify(models, "digits", 1, Progress())
        assert (manifest.version, damages) == (1, [])

    @promise("S-383")
    def test_a_flipped_bit_is_found_and_named(self, home: Home, models: Models, source: Path, tmp_path: Path) -> None:
        """The error names the file and both digests, and nothing is exported."""
        for number, path in enumerate(("saved_model.pb", "variables/data", "run.sh", "n" * 255)):
            good = hashlib.sha256((source / path).read_bytes()).hexdigest()
            home.flip(f"digits/1/{path}", 3)
            bad = hashlib.sha256(home.get(f"digits/1/{path}")).hexdigest()

            [damage] = verify(models, "digits", 1, Progress())[1]
            said = f"digits/1/{path}: was saved with sha256 {good}, and has {bad} now"
            assert damage.endswith(said)

            place = tmp_path / f"out{number}"
            exports: list[tuple[Callable[..., object], object]] = [
                (export_directory, place),
                (export_layout, place),
                (export_tar, io.BytesIO()),
                (export_tree, home.data(f"out{number}")),
            ]
            for export, target in exports:
                with pytest.raises(VersionDamaged) as raised:
                    export(models, "digits", 1, target, Progress())
                assert str(raised.value).endswith(said)
                assert not place.exists()
                assert not list(tmp_path.glob(".*")), "something half made is left"
            with suppress(NotFound):
                assert [node.path for node in home.data(f"out{number}").scan() if node.kind == "file"] == []
            home.flip(f"digits/1/{path}", 3)

    @promise("S-383")
    def test_every_other_change_of_a_version_is_named(self, home: Home, models: Models) -> None:
        """These are lost and added files, sizes, links and modes."""
        home.put("digits/1/extra", b"x")
        home.put("digits/1/run.sh", b"longer than it was")
        storage = models.storage
        storage.remove("digits/1/saved_model.pb")
        if home.root is not None:
            (home.root / "models/digits/1/latest").unlink()
            (home.root / "models/digits/1/latest").symlink_to("elsewhere")
            (home.root / "models/digits/1/variables/data").chmod(0o600)
            (home.root / "models/digits/1/assets").rmdir()
        else:
            storage.remove("digits/1/assets/")
            home.put("digits/1/latest.rclonelink", b"elsewhere")

        damages = {damage.partition(": ")[0].rpartition("digits/1/")[2]: damage for damage in verify_all(models)}

        expected = {"extra", "run.sh", "saved_model.pb", "latest", "assets"}
        assert set(damages) == expected | ({"variables/data"} if home.root is not None else set())
        assert damages["saved_model.pb"].endswith("is missing")
        assert "has 18 bytes now, and was saved with 10" in damages["run.sh"]
        assert "leads to elsewhere now, and was saved as a link to variables/data" in damages["latest"]
        assert "somebody else put it there" in damages["extra"]

    @promise("S-383")
    def test_a_damaged_manifest_is_never_believed(self, home: Home, models: Models, tmp_path: Path) -> None:
        home.flip("digits/1.json", 300)
        with pytest.raises(VersionDamaged, match=r"digits/1\.json"):
            verify(models, "digits", 1, Progress())
        with pytest.raises(VersionDamaged, match=r"digits/1\.json"):
            export_directory(models, "digits", 1, tmp_path / "out", Progress())


def verify_all(models: Models) -> list[str]:
    return verify(models, "digits", 1, Progress())[1]


class TestDirectory:
    @promise("S-384")
    @pytest.mark.parametrize("empty_before", [False, True])
    @pytest.mark.parametrize("in_a_datastore", [False, True])
    def test_an_export_appears_only_when_it_is_complete(
        self,
        models: Models,
        source: Path,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        in_a_datastore: bool,
        empty_before: bool,
    ) -> None:
        """An interrupted export leaves nothing under the name; the next one goes on."""

        def export(progress: Progress) -> None:
            if in_a_datastore:
                export_tree(models, "digits", 1, DirectoryTree(place, within=tmp_path), progress)
            else:
                export_directory(models, "digits", 1, place, progress)

        monkeypatch.setattr("datastore.models.transfer.FILES_AT_ONCE", 1)
        place = tmp_path / "out"
        if empty_before:
            place.mkdir()
        progress = Progress()
        real, read = progress.count, []

        def count(files: int, size_bytes: int) -> None:
            real(files, size_bytes)
            read.append(files)
            if sum(read) >= 3:
                raise Stopped("SIGTERM", resume=True)

        progress.count = count  # type: ignore[method-assign]
        with pytest.raises(Stopped):
            export(progress)
        assert list(tmp_path.rglob("out/*")) == []
        [partial] = [each for each in tmp_path.iterdir() if each.name.endswith(".partial")]
        (next(each for each in partial.rglob("*") if each.is_file())).write_bytes(b"torn")

        export(Progress())

        assert tree_of(place) == tree_of(source)
        assert [each for each in tmp_path.iterdir() if each.name.endswith(".partial")] == []

    @promise("S-384", "S-388")
    @pytest.mark.parametrize("resume", [False, True])
    @pytest.mark.parametrize("export", [export_directory, export_layout, export_tar_file])
    def test_an_export_that_is_stopped_leaves_only_what_the_next_one_can_use(
        self, models: Models, tmp_path: Path, export: Callable[..., object], resume: bool
    ) -> None:
        """Ctrl-C stops it for good; after SIGTERM the next export of a directory goes on with the files."""
        place = tmp_path / "made" / "out"
        place.parent.mkdir()
        progress = Progress(lambda event: progress.stop(resume=resume) if event.phase == "reading" else None)
        with pytest.raises(Stopped):
            export(models, "digits", 1, place, progress)
        assert bool(list(place.parent.iterdir())) == (resume and export is export_directory)

        export(models, "digits", 1, place, Progress())
        assert list(place.parent.iterdir()) == [place]

    @promise("S-384")
    @pytest.mark.parametrize("fails", [False, True])
    @pytest.mark.parametrize("export", [export_directory, export_layout, export_tar_file])
    def test_two_exports_at_once_to_one_place_do_not_disturb_each_other(
        self, models: Models, tmp_path: Path, export: Callable[..., object], fails: bool
    ) -> None:
        """The second waits until the first has ended, and says then that it is there, or makes it if that failed."""
        place, waits, begun = tmp_path / "out", Progress(), threading.Event()
        check = waits.check
        waits.check = lambda: begun.set() or check()  # type: ignore[func-returns-value,method-assign]
        asked: list[Future[object]] = []
        with ThreadPoolExecutor(1) as second:

            def begin_another(event: Event) -> None:
                if event.phase == "reading" and event.files == 3 and not asked:
                    asked.append(second.submit(export, models, "digits", 1, place, waits))
                    assert begun.wait(60)
                    if fails:
                        raise OutOfSpace("full")

            with pytest.raises(OutOfSpace) if fails else nullcontext():
                export(models, "digits", 1, place, Progress(begin_another, clock=itertools.count().__next__))
            with nullcontext() if fails else pytest.raises(AlreadyExists, match="out: is there already"):
                asked[0].result(60)
        export(models, "digits", 1, tmp_path / "alone", Progress())
        first, other = (tree_of(each) if each.is_dir() else each.read_bytes() for each in (place, tmp_path / "alone"))
        assert first == other
        assert not list(tmp_path.glob(".*"))

    @promise("S-384")
    def test_an_export_takes_over_from_one_that_was_killed_on_another_machine(
        self, models: Models, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its process can't be seen from here; that it is silent for a minute can."""
        monkeypatch.setattr(owner, "identity", lambda: {"host": "other", "kernel": "other", "process": "1:1"})
        progress = Progress(lambda event: progress.stop(resume=True) if event.phase == "reading" else None)
        monkeypatch.setattr(DirectoryStorage, "remove", lambda *_: None)  # it can't even let go of it
        with pytest.raises(Stopped):
            export_directory(models, "digits", 1, tmp_path / "out", progress)
        monkeypatch.undo()
        [left] = tmp_path.glob(".*/owner")
        monkeypatch.setattr(exporting, "OWNER_POLL_S", 0.01)

        looks = Progress()
        counted = itertools.count()
        check = looks.check

        def ages() -> None:
            if next(counted) == 3:
                os.utime(left, times=(0, 0))
            check()

        looks.check = ages  # type: ignore[method-assign]
        export_directory(models, "digits", 1, tmp_path / "out", looks)
        assert next(counted) > 4, "it waited"
        assert tree_of(tmp_path / "out") == tree_of(source)

    @promise("S-381", "S-384")
    @pytest.mark.parametrize("form", ["directory", "oci", "tar"])
    def test_an_export_whose_version_is_deleted_meanwhile_says_so(
        self, models: Models, tmp_path: Path, form: str
    ) -> None:
        """Nothing of it is left, and there is no advice about somebody who writes there."""

        def delete(event: Event) -> None:
            if event.phase == "reading":
                models.delete("digits", 1)

        progress = Progress(delete)
        exports: dict[str, tuple[Callable[..., object], object]] = {
            "directory": (export_directory, tmp_path / "out"),
            "oci": (export_layout, tmp_path / "out"),
            "tar": (export_tar, io.BytesIO()),
        }
        export, target = exports[form]
        with pytest.raises(ModelNotFound, match="digits:1 is no version: it was deleted at"):
            export(models, "digits", 1, target, progress)
        assert not (tmp_path / "out").exists()
        assert not list(tmp_path.glob(".out*"))

    @promise("S-384")
    def test_an_export_replaces_no_existing_file(self, models: Models, tmp_path: Path) -> None:
        place = tmp_path / "out"
        place.mkdir()
        (place / "mine").write_bytes(b"x")
        for export in (export_directory, export_layout):
            with pytest.raises(AlreadyExists, match="out: is there already"):
                export(models, "digits", 1, place, Progress())
        assert [each.name for each in place.iterdir()] == ["mine"]
        (place / "mine").unlink()
        export_directory(models, "digits", 1, place, Progress())
        assert (place / "run.sh").stat().st_mode & 0o777 == 0o755

    @promise("S-384")
    @pytest.mark.skipif(os.getuid() != 0, reason="only root mounts a tmpfs")
    @pytest.mark.parametrize("export", [export_directory, export_layout])
    def test_an_export_fills_a_mount_point(
        self, models: Models, source: Path, tmp_path: Path, export: Callable[..., object]
    ) -> None:
        """As the empty volume of a pod; nothing goes beside it, where another file system is."""
        for name in ("alone", "volume"):
            (tmp_path / name).mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", tmp_path / "volume"], check=True)
        try:
            beside = sorted(os.listdir(tmp_path))
            looked = Progress(lambda _: pytest.fail("beside it") if sorted(os.listdir(tmp_path)) != beside else None)
            export(models, "digits", 1, tmp_path / "volume", looked)
            export(models, "digits", 1, tmp_path / "alone", Progress())
            assert tree_of(tmp_path / "volume") == tree_of(tmp_path / "alone")
        finally:
            subprocess.run(["umount", tmp_path / "volume"], check=True)

    @promise("S-384")
    @pytest.mark.skipif(os.getuid() != 0, reason="only root mounts a tmpfs")
    @pytest.mark.parametrize("export", [export_directory, export_layout, export_tar_file])
    def test_an_export_that_fills_the_disk_names_the_place_and_leaves_nothing(
        self, models: Models, tmp_path: Path, export: Callable[..., object]
    ) -> None:
        (tmp_path / "disk").mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8k", "tmpfs", tmp_path / "disk"], check=True)
        try:
            with pytest.raises(OutOfSpace, match=r"disk/.*out.*: No space left on device"):
                export(models, "digits", 1, tmp_path / "disk" / "out", Progress())
            assert os.listdir(tmp_path / "disk") == []
        finally:
            subprocess.run(["umount", tmp_path / "disk"], check=True)

    @promise("S-384")
    def test_a_name_of_255_bytes_is_a_target(self, models: Models, source: Path, tmp_path: Path) -> None:
        for number, name in enumerate(("n" * 255, "漢" * 85)):
            export_directory(models, "digits", 1, tmp_path / str(number) / name, Progress())
            assert tree_of(tmp_path / str(number) / name) == tree_of(source)

    @promise("S-378")
    def test_a_directory_that_nobody_may_write_in_is_exported_and_deleted(
        self, home: Home, source: Path, tmp_path: Path
    ) -> None:
        (source / "variables").chmod(0o555)
        models = home.models()
        save(models, DirectoryTree(source), wish(), Progress())
        export_directory(models, "digits", 1, tmp_path / "out", Progress())
        assert tree_of(tmp_path / "out") == tree_of(source)
        models.delete("digits", 1)
        assert [path for path in home.everything() if path.startswith("digits")] == ["digits/1.json"]


class TestBucket:
    @promise("S-378", "S-384", "S-385")
    def test_a_version_goes_to_another_place_and_comes_back(self, home: Home, models: Models) -> None:
        export_tree(models, "digits", 1, home.data("out"), Progress())

        copied = save(models, home.data("out"), wish("copy"), Progress()).manifest
        assert copied.digest == models.head("digits", 1).digest

    @promise("S-384")
    def test_files_of_an_earlier_export_are_kept_and_foreign_ones_named(self, home: Home, models: Models) -> None:
        """The second attempt reads what is there, and sends what is missing."""
        export_tree(models, "digits", 1, home.data("out"), Progress())
        home.data("out").discard("run.sh")
        export_tree(models, "digits", 1, home.data("out"), Progress())
        target = home.data("out")
        target.discard("run.sh")
        with target.write("run.sh", 0o755, 10) as sink:
            sink.write(b"not ours !")
        with pytest.raises(AlreadyExists, match=r"out/run\.sh: is there with another content"):
            export_tree(models, "digits", 1, home.data("out"), Progress())
        target.discard("run.sh")
        with target.write("mine", 0o644, 1) as sink:
            sink.write(b"x")
        with pytest.raises(AlreadyExists, match="out/mine: is there already"):
            export_tree(models, "digits", 1, home.data("out"), Progress())

    @promise("S-372")
    def test_on_one_endpoint_the_server_copies(self, bucket: Home, source: Path) -> None:
        models = bucket.models()
        save(models, DirectoryTree(source), wish(), Progress())
        objects = bucket.objects("data")
        from datastore.models.objects import ObjectTree

        export_tree(models, "digits", 1, ObjectTree(objects, "out/"), Progress())
        asked = objects.metrics.snapshot()
        assert asked["copy"]["calls"] == 6
        assert asked["put"]["sent_bytes"] < 100


class TestTar:
    @promise("S-384")
    def test_equal_versions_make_equal_archives(self, home: Home, models: Models, source: Path, tmp_path: Path) -> None:
        """Time and place don't matter, and tar itself reads them."""
        first, second = tar_of(models, tmp_path / "a.tar"), tar_of(home.models(), tmp_path / "b.tar")
        assert first.read_bytes() == second.read_bytes()
        (tmp_path / "out").mkdir()
        done = subprocess.run(
            ["tar", "-C", str(tmp_path / "out"), "-xpf", str(first)], capture_output=True, text=True, check=True
        )
        assert done.stderr == ""
        assert tree_of(tmp_path / "out") == tree_of(source)

    @promise("S-378", "S-385")
    @pytest.mark.parametrize("packed", [False, True])
    def test_it_comes_back_bit_for_bit(self, models: Models, tmp_path: Path, packed: bool) -> None:
        place = tar_of(models, tmp_path / "a.tar")
        if packed:
            place.write_bytes(gzip.compress(place.read_bytes()))
        with open_tar(place) as archive:
            copied = save(models, archive, wish("copy"), Progress()).manifest
            assert archive.said == ("digits:1", copied.digest)
        assert copied.entries == models.manifest("digits", 1).entries

    @promise("S-385")
    def test_what_tar_made_of_a_directory_is_imported(self, models: Models, source: Path, tmp_path: Path) -> None:
        """Its names begin with ./, and it has hard links."""
        os.link(source / "run.sh", source / "zz-hard")
        subprocess.run(["tar", "-C", str(source), "-cf", str(tmp_path / "a.tar"), "."], check=True)
        with open_tar(tmp_path / "a.tar") as archive:
            copied = save(models, archive, wish("copy"), Progress()).manifest
        entries = {entry.path: entry for entry in copied.entries}
        assert entries["zz-hard"].sha256 == entries["run.sh"].sha256
        del entries["zz-hard"]
        assert tuple(entries.values()) == models.manifest("digits", 1).entries


def tar_with(place: Path, *members: tarfile.TarInfo) -> Path:
    with tarfile.open(place, "w") as archive:
        for each in members:
            archive.addfile(each, io.BytesIO(bytes(each.size)))
    return place


def info(name: str, kind: bytes = tarfile.REGTYPE, target: str = "", size: int = 0) -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.type, made.linkname, made.size, made.mode = kind, target, size, 0o644
    return made


class TestHostileArchives:
    @promise("S-385")
    @pytest.mark.parametrize(
        ("members", "what"),
        [
            ([info("../../etc/passwd")], "no plain relative path"),
            ([info("/etc/passwd")], "no plain relative path"),
            ([info("a/../../b")], "no plain relative path"),
            ([info("l", tarfile.SYMTYPE, "d"), info("l/passwd")], "in what is no directory"),
            ([info("f"), info("f")], "has f twice"),
            ([info("f"), info("f/g")], "in what is no directory"),
            ([info("dev", tarfile.CHRTYPE)], "device"),
            ([info("h", tarfile.LNKTYPE, "/etc/shadow")], "h is a hard link to /etc/shadow, which is not there"),
            ([info("h", tarfile.LNKTYPE, "nothing")], "hard link to nothing, which is not there"),
            ([info("h", tarfile.LNKTYPE, "../../etc/passwd")], "h is a hard link to ../../etc/passwd, which is not"),
            ([info("d/l", tarfile.SYMTYPE, "../../w")], "d/l is a symbolic link to ../../w, which leads out"),
            ([info("l", tarfile.SYMTYPE, "/etc/passwd")], "l is a symbolic link to /etc/passwd, which leads out"),
            (
                [info("d/up", tarfile.SYMTYPE, ".."), info("l", tarfile.SYMTYPE, "d/up/../etc/passwd")],
                "l is a symbolic link to d/up/../etc/passwd, which leads out",
            ),
            ([info("x" * 300)], "too long"),
        ],
    )
    def test_an_archive_that_leads_elsewhere_is_refused(
        self, home: Home, tmp_path: Path, members: list[tarfile.TarInfo], what: str
    ) -> None:
        place = tar_with(tmp_path / "bad.tar", *members)
        with open_tar(place) as archive, pytest.raises(SourceInvalid, match=what):
            save(home.models(), archive, wish(), Progress())
        assert home.models().newest("digits") is None

    @promise("S-385")
    def test_a_file_that_is_no_archive_is_refused(self, home: Home, tmp_path: Path) -> None:
        (tmp_path / "a.tar").write_bytes(b"no archive at all" * 100)
        (tmp_path / "b.tar").write_bytes(b"\x1f\x8b broken")
        for name in ("a.tar", "b.tar", "missing.tar"):
            with pytest.raises(SourceInvalid, match=name), open_tar(tmp_path / name) as archive:
                save(home.models(), archive, wish(), Progress())
        with pytest.raises(ModelError, match="is no OCI image layout"), open_layout(tmp_path):
            pass

    @promise("S-385")
    def test_a_cut_archive_is_refused(self, models: Models, tmp_path: Path) -> None:
        place = tar_of(models, tmp_path / "a.tar")
        place.write_bytes(place.read_bytes()[:12_000])
        with open_tar(place) as archive, pytest.raises((SourceInvalid, ModelError)):
            save(models, archive, wish("copy", digest=models.head("digits", 1).digest), Progress())
        assert models.newest("copy") is None


class TestLayout:
    @promise("S-384")
    def test_equal_versions_make_equal_layouts(self, home: Home, models: Models, tmp_path: Path) -> None:
        export_layout(models, "digits", 1, tmp_path / "a", Progress())
        export_layout(home.models(), "digits", 1, tmp_path / "b", Progress())
        assert tree_of(tmp_path / "a") == tree_of(tmp_path / "b")

    @promise("S-384")
    def test_the_layout_follows_the_oci_specification(self, models: Models, source: Path, tmp_path: Path) -> None:
        """Every blob has its digest and size, layers their diff_ids, and the files are below /models."""
        export_layout(models, "digits", 1, tmp_path / "a", Progress(), layer_bytes=5000)
        layout = Layout(tmp_path / "a")
        index = json.loads((tmp_path / "a" / "index.json").read_text())
        assert json.loads((tmp_path / "a" / "oci-layout").read_text()) == {"imageLayoutVersion": "1.0.0"}
        for blob in (tmp_path / "a" / "blobs" / "sha256").iterdir():
            assert hashlib.sha256(blob.read_bytes()).hexdigest() == blob.name
        [top] = index["manifests"]
        assert (top["mediaType"], top["annotations"]["org.opencontainers.image.ref.name"]) == (INDEX, "1")
        assert top["annotations"][DIGEST_LABEL] == models.head("digits", 1).digest

        images = layout.images()
        assert [each["platform"]["architecture"] for each in images] == ["amd64", "arm64"]
        layers = []
        for each in images:
            assert each["mediaType"] == MANIFEST
            manifest = layout.document(each)
            config = layout.document(manifest["config"])
            assert config["architecture"] == each["platform"]["architecture"]
            assert config["rootfs"]["diff_ids"] == [layer["digest"] for layer in manifest["layers"]]
            assert len(config["history"]) == len(manifest["layers"])
            for layer in manifest["layers"]:
                assert layout.blob(layer["digest"]).stat().st_size == layer["size"]
            layers.append(manifest["layers"])
        assert layers[0] == layers[1]
        assert len(layers[0]) > 1

        root = tmp_path / "root"
        root.mkdir()
        for layer in layers[0]:
            subprocess.run(["tar", "-C", str(root), "-xpf", str(layout.blob(layer["digest"]))], check=True)
        assert tree_of(root / "models") == tree_of(source)

    @promise("S-378", "S-385")
    @pytest.mark.parametrize("packed", [False, True])
    def test_it_comes_back_bit_for_bit(self, models: Models, tmp_path: Path, packed: bool) -> None:
        """The same holds after a registry has compressed the layers."""
        export_layout(models, "digits", 1, tmp_path / "a", Progress(), layer_bytes=5000)
        if packed:
            repack(tmp_path / "a")
        with open_layout(tmp_path / "a") as archive:
            copied = save(models, archive, wish("copy", digest=archive.said.digest), Progress()).manifest
        assert copied.entries == models.manifest("digits", 1).entries

    @promise("S-384")
    def test_a_layout_can_be_put_on_a_base_image(self, models: Models, source: Path, tmp_path: Path) -> None:
        """KServe's modelcars need a shell beside the model."""
        base = Layout(tmp_path / "base")
        base.begin()
        shell = tar_with(tmp_path / "shell.tar", info("bin", tarfile.DIRTYPE), info("bin/sh", size=7))
        digest = hashlib.sha256(shell.read_bytes()).hexdigest()
        os.rename(shell, base.root / "blobs/sha256" / digest)
        layer = {"mediaType": "application/vnd.oci.image.layer.v1.tar", "digest": f"sha256:{digest}", "size": 10240}
        config = {
            "architecture": "amd64",
            "os": "linux",
            "config": {"Env": ["PATH=/bin"]},
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
            "history": [{"created_by": "base"}],
        }
        described = base.add_document("application/vnd.oci.image.config.v1+json", config)
        manifest = {"schemaVersion": 2, "mediaType": MANIFEST, "config": described, "layers": [layer]}
        base.write_index([base.add_document(MANIFEST, manifest)])

        export_layout(models, "digits", 1, tmp_path / "a", Progress(), base=base.root)

        layout = Layout(tmp_path / "a")
        [image] = layout.images()
        made = layout.document(image)
        assert made["layers"][0] == layer
        assert layout.blob(f"sha256:{digest}").stat().st_size == 10240
        with_model = layout.document(made["config"])
        assert with_model["config"] == {"Env": ["PATH=/bin"]}
        assert with_model["rootfs"]["diff_ids"][0] == f"sha256:{digest}"
        assert len(with_model["history"]) == 2
        with open_layout(tmp_path / "a") as archive:
            copied = save(models, archive, wish("copy"), Progress()).manifest
        assert copied.digest == models.head("digits", 1).digest

    @promise("S-385")
    def test_layers_hide_what_earlier_ones_have(self, home: Home, tmp_path: Path) -> None:
        """Another program built this image."""
        layout = Layout(tmp_path / "a")
        layout.begin()
        layers = [
            [
                info("models", tarfile.DIRTYPE),
                info("models/old"),
                info("models/d", tarfile.DIRTYPE),
                info("models/d/x"),
            ],
            [info("models/.wh.old"), info("models/d/.wh..wh..opq"), info("models/d/y"), info("etc/passwd")],
        ]
        described = []
        for number, members in enumerate(layers):
            body = tar_with(tmp_path / f"{number}.tar", *members).read_bytes()
            digest = hashlib.sha256(body).hexdigest()
            (layout.root / "blobs/sha256" / digest).write_bytes(body)
            described.append(
                {"mediaType": "application/vnd.oci.image.layer.v1.tar", "digest": f"sha256:{digest}", "size": len(body)}
            )
        config = layout.add_document(
            "application/vnd.oci.image.config.v1+json", {"architecture": "amd64", "os": "linux"}
        )
        manifest = {"schemaVersion": 2, "mediaType": MANIFEST, "config": config, "layers": described}
        layout.write_index([layout.add_document(MANIFEST, manifest)])

        with open_layout(layout.root) as archive:
            made = save(home.models(), archive, wish(), Progress()).manifest
        assert [entry.path for entry in made.entries] == ["d", "d/y"]
        blob = layout.blob(str(described[1]["digest"]))
        blob.write_bytes(blob.read_bytes()[:-1] + b"x")
        with pytest.raises(SourceInvalid, match="not the one that it is named by"), open_layout(layout.root):
            pass

    def test_a_layer_has_the_directories_of_its_files(self) -> None:
        entries = [
            Entry("a", "directory", 0o700),
            Entry("a/1", "file", 0o644, 60, "0" * 64),
            Entry("a/b", "directory", 0o711),
            Entry("a/b/2", "file", 0o644, 60, "0" * 64),
            Entry("z", "file", 0o644, 60, "0" * 64),
        ]
        assert [[entry.path for entry in layer] for layer in cut(entries, 100)] == [
            ["a", "a/1", "a/b"],
            ["a", "a/b", "a/b/2"],
            ["z"],
        ]


def repack(root: Path) -> None:
    """Compress the layers, which get new digests, as a registry client does."""
    layout = Layout(root)
    manifests = []
    for each in layout.images():
        manifest = layout.document(each)
        for layer in manifest["layers"]:
            body = gzip.compress(layout.blob(layer["digest"]).read_bytes(), mtime=0)
            digest = hashlib.sha256(body).hexdigest()
            (root / "blobs/sha256" / digest).write_bytes(body)
            layer |= {"digest": f"sha256:{digest}", "size": len(body), "mediaType": layer["mediaType"] + "+gzip"}
        manifests.append(layout.add_document(MANIFEST, manifest))
    layout.write_index(manifests)


def test_the_difference_of_two_versions_is_by_their_paths(home: Home, models: Models, source: Path) -> None:
    (source / "run.sh").chmod(0o644)
    (source / "saved_model.pb").unlink()
    (source / "new").write_bytes(b"")
    save(models, DirectoryTree(source), wish(), Progress())
    found = compared(models.manifest("digits", 1), models.manifest("digits", 2))
    assert [(path, old is None, new is None) for path, old, new in found] == [
        ("new", True, False),
        ("run.sh", False, False),
        ("saved_model.pb", False, True),
    ]
