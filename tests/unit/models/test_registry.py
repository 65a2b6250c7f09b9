"""datastore.models.registry: numbers, aliases, uses, deletion and garbage, in a directory and in a bucket."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TypeVar

import pytest

from datastore.errors import Unsupported
from datastore.fuse.store.base import Body, WriteOptions, WriteResult
from datastore.models import owner
from datastore.models.directory import DirectoryStorage, DirectoryTree
from datastore.models.errors import (
    FormatUnknown,
    InvalidReference,
    ModelError,
    ModelNotFound,
    SaveLost,
    VersionDamaged,
    VersionInUse,
)
from datastore.models.jobs import perform
from datastore.models.names import parse_reference
from datastore.models.progress import Progress
from datastore.models.registry import MARKER, Models, Use
from datastore.models.saving import save
from datastore.models.storage import Tag
from tests.memorystore import HookedStore
from tests.modelstores import Home, wish
from tests.promises import promise

T = TypeVar("T")


def saved(models: Models, source: Path, save_id: str = "") -> int:
    return save(models, DirectoryTree(source), wish(force=True, save_id=save_id), Progress()).manifest.version


@pytest.fixture
def models(home: Home) -> Models:
    return home.models()


class TestNumbers:
    @promise("S-373")
    def test_versions_are_numbered_from_one(self, models: Models, source: Path) -> None:
        assert [saved(models, source) for _ in range(3)] == [1, 2, 3]
        assert [each.version for each in models.versions("digits")] == [3, 2, 1]
        assert models.names() == ["digits"]

    @promise("S-373", "S-381")
    def test_a_deleted_number_never_comes_again(self, models: Models, source: Path) -> None:
        """Also of the newest version."""
        saved(models, source)
        saved(models, source)
        models.delete("digits", 2)

        assert saved(models, source) == 3
        with pytest.raises(ModelNotFound, match="it was deleted at 20"):
            models.head("digits", 2)

    @promise("S-373")
    def test_a_number_belongs_to_one_save(self, models: Models) -> None:
        first, second = models.reserve("m", "a", "x"), models.reserve("m", "b", "y")
        assert (first.number, second.number) == (1, 2)

    @promise("S-373")
    def test_a_number_that_became_a_version_after_the_look_is_passed(self, home: Home, source: Path) -> None:
        """Between the look at the numbers and the reservation, another save begins and ends."""
        models = home.models()
        look = models.numbers

        def late(model: str) -> object:
            found = look(model)
            models.numbers = look  # type: ignore[method-assign]
            assert saved(home.models(), source) == 1
            return found

        models.numbers = late  # type: ignore[method-assign,assignment]
        assert models.reserve("digits", "a", "x").number == 2

    def test_latest_and_a_bare_name_mean_the_newest_version(self, models: Models, source: Path) -> None:
        for _ in range(11):
            saved(models, source)
        assert models.resolve(parse_reference("digits")) == 11
        assert models.resolve(parse_reference("digits:latest")) == 11
        assert models.resolve(parse_reference("digits:2")) == 2
        with pytest.raises(ModelNotFound, match="no version 12"):
            models.resolve(parse_reference("digits:12"))
        with pytest.raises(ModelNotFound, match="no version of a model other"):
            models.resolve(parse_reference("other"))

    @promise("S-383")
    def test_a_manifest_under_another_number_is_refused(self, home: Home, source: Path) -> None:
        models = home.models()
        saved(models, source)
        home.put("digits/2.json", home.get("digits/1.json"))
        with pytest.raises(VersionDamaged, match=r"2\.json: is the manifest of digits:1"):
            models.manifest("digits", 2)


class TestAliases:
    @promise("S-370", "S-380")
    def test_an_alias_holds_a_number_that_anybody_reads(self, home: Home, source: Path) -> None:
        models = home.models()
        saved(models, source)
        saved(models, source)

        assert models.set_alias("digits", "prod", 1) is None
        assert models.set_alias("digits", "prod", 2) == 1

        assert home.get("digits/aliases/prod") == b"2\n"
        assert models.aliases("digits") == {"prod": 2}
        assert models.resolve(parse_reference("digits:prod")) == 2
        models.remove_alias("digits", "prod")
        assert models.aliases("digits") == {}
        with pytest.raises(ModelNotFound, match="has no alias prod"):
            models.remove_alias("digits", "prod")
        with pytest.raises(ModelNotFound, match="has no alias prod; it has none"):
            models.resolve(parse_reference("digits:prod"))

    @promise("S-380")
    def test_an_alias_is_moved_only_from_where_it_is_expected(self, models: Models, source: Path) -> None:
        for _ in range(3):
            saved(models, source)
        models.set_alias("digits", "prod", 1, expected=0)
        models.set_alias("digits", "prod", 2, expected=1)

        with pytest.raises(ModelError, match="is at 2, not at 1; it was left there"):
            models.set_alias("digits", "prod", 3, expected=1)
        with pytest.raises(ModelError, match="does not exist, not at 1"):
            models.set_alias("digits", "canary", 3, expected=1)
        assert models.aliases("digits") == {"prod": 2}

    @promise("S-380")
    def test_of_two_simultaneous_moves_of_an_alias_one_fails(self, home: Home, source: Path) -> None:
        models = home.models()
        saved(models, source)
        models.set_alias("digits", "prod", 1)
        storage, real = models.storage, models.storage.replace

        def late(path: str, body: bytes, tag: Tag) -> Tag:
            if path.endswith("/prod"):
                storage.replace = real  # type: ignore[method-assign]
                home.put("digits/aliases/prod", b"7\n")
            return real(path, body, tag)

        storage.replace = late  # type: ignore[method-assign]
        with pytest.raises(ModelError, match="moved by somebody else in the meantime"):
            models.set_alias("digits", "prod", 1)
        assert home.get("digits/aliases/prod") == b"7\n"

    def test_an_alias_means_a_version_that_is_there(self, models: Models, source: Path) -> None:
        saved(models, source)
        with pytest.raises(ModelNotFound):
            models.set_alias("digits", "prod", 2)
        with pytest.raises(InvalidReference):
            models.set_alias("digits", "latest", 1)

    @promise("S-383")
    def test_a_damaged_alias_is_named_and_can_be_moved(self, home: Home, source: Path) -> None:
        models = home.models()
        saved(models, source)
        home.put("digits/aliases/prod", b"7.5\n")
        with pytest.raises(VersionDamaged, match="aliases/prod: holds no number"):
            models.resolve(parse_reference("digits:prod"))

        models.set_alias("digits", "prod", 1)
        assert models.resolve(parse_reference("digits:prod")) == 1


class TestDeletion:
    @promise("S-381")
    def test_a_version_goes_with_its_files(self, home: Home, source: Path) -> None:
        models = home.models()
        saved(models, source)
        before = home.everything()
        saved(models, source)

        assert models.delete("digits", 2) > 5

        assert home.everything() == sorted([*before, "digits/2.json"])
        assert [each.version for each in models.versions("digits")] == [1]
        with pytest.raises(ModelNotFound):
            models.delete("digits", 2)

    @promise("S-381")
    def test_a_version_in_use_stays(self, home: Home, source: Path) -> None:
        models = home.models()
        saved(models, source)
        everything = home.everything()
        models.set_alias("digits", "prod", 1)
        with pytest.raises(VersionInUse, match="the alias prod means it"):
            models.delete("digits", 1)
        models.remove_alias("digits", "prod")
        use = Use(id="uid-1", who="Serving ml/digits")
        models.add_use("digits", 1, use)
        models.add_use("digits", 1, use)
        assert models.uses("digits", 1) == [use]
        with pytest.raises(VersionInUse, match="served by Serving ml/digits"):
            models.delete("digits", 1)
        models.remove_use("digits", 1, "uid-1")
        models.remove_use("digits", 1, "uid-1")
        assert home.everything() == everything
        assert models.delete("digits", 1)
        with pytest.raises(ModelNotFound):
            models.add_use("digits", 1, use)
        assert models.uses("digits", 1) == []

    @promise("S-408")
    def test_what_a_dead_process_of_this_machine_served_is_not_in_use(self, home: Home, source: Path) -> None:
        """One that lives is; what another machine serves is, too."""
        models = home.models()
        saved(models, source)
        dead = owner.identity() | {"process": f"{os.getpid()}:1"}
        models.add_use("digits", 1, Use(id="dead", who="datastore serve on here", process=dead))
        assert models.uses("digits", 1) == []
        for identity in (owner.identity(), dead | {"kernel": "another one"}):
            models.add_use("digits", 1, Use(id="lives", who="datastore serve on there", process=identity))
            with pytest.raises(VersionInUse, match="served by datastore serve on there"):
                models.delete("digits", 1)
            models.remove_use("digits", 1, "lives")
        assert models.delete("digits", 1)

    @promise("S-381")
    @pytest.mark.parametrize("what", ["alias", "use"])
    def test_a_version_that_is_used_during_its_deletion_is_kept(self, home: Home, source: Path, what: str) -> None:
        """An alias or a Serving in between: either it is refused, or the deletion is."""
        models, other = home.models(), home.models()
        saved(models, source)
        storage, real = models.storage, models.storage.replace

        def late(path: str, body: bytes, tag: Tag) -> Tag:
            if path == "digits/1.json":
                storage.replace = real  # type: ignore[method-assign]
                if what == "alias":
                    other.set_alias("digits", "prod", 1)
                else:
                    other.add_use("digits", 1, Use(id="u", who="Serving ml/digits"))
            return real(path, body, tag)

        storage.replace = late  # type: ignore[method-assign]
        with pytest.raises(VersionInUse):
            models.delete("digits", 1)
        assert models.manifest("digits", 1).entries

    @promise("S-381")
    def test_an_alias_that_is_set_during_a_deletion_is_undone(self, home: Home, source: Path) -> None:
        models, other = home.models(), home.models()
        saved(models, source)
        saved(models, source)
        models.set_alias("digits", "prod", 2)
        storage, real = models.storage, models.storage.replace

        def late(path: str, body: bytes, tag: Tag) -> Tag:
            if path.endswith("/prod"):
                storage.replace = real  # type: ignore[method-assign]
                other.delete("digits", 1)
            return real(path, body, tag)

        storage.replace = late  # type: ignore[method-assign]
        with pytest.raises(ModelNotFound):
            models.set_alias("digits", "prod", 1)
        assert models.aliases("digits") == {"prod": 2}


class TestGarbage:
    def leave(self, models: Models, number_of_files: int = 1) -> int:
        """A save that stopped in the middle."""
        saving = models.reserve("digits", "dead", "somewhere")
        tree = models.tree("digits", saving.number)
        tree.begin()
        for number in range(number_of_files):
            with tree.write(f"f{number}", 0o644, 1) as sink:
                sink.write(b"x")
        return saving.number

    @promise("S-382")
    def test_a_living_save_is_no_garbage(self, models: Models) -> None:
        self.leave(models)
        assert list(models.garbage("digits")) == []
        assert list(models.garbage("digits", stale_s=1000)) == []

    @promise("S-376", "S-382")
    def test_a_silent_save_is_garbage_and_can_not_become_a_version(self, home: Home, source: Path) -> None:
        models = home.models()
        saved(models, source)
        before = home.everything()
        number = self.leave(models, 3)
        saving = next(models.savings("digits"))

        [garbage] = models.garbage("digits", stale_s=-1)
        assert (garbage.number, garbage.why) == (number, "unfinished")
        assert models.remove_garbage(garbage) == 3

        assert home.everything() == sorted([*before, f"digits/{number}.json"])
        manifest = models.manifest("digits", 1)
        with pytest.raises(SaveLost, match="considered dead"):
            models.commit(saving, manifest)
        with pytest.raises(SaveLost, match="considered dead"):
            models.renew(saving)
        assert list(models.garbage("digits", stale_s=-1)) == []
        assert saved(models, source) == number + 1

    @promise("S-376")
    def test_a_save_that_became_a_version_meanwhile_is_left_alone(self, home: Home, source: Path) -> None:
        """Gc had taken it for dead, and it was not."""
        models = home.models()
        saving = models.reserve("digits", "slow", "somewhere")
        [garbage] = models.garbage("digits", stale_s=-1)
        other = home.models()
        saved(other, source)
        manifest = other.manifest("digits", 2)
        home.put(f"digits/{saving.number}.json", manifest.text().replace('"version":2', '"version":1').encode())

        assert models.remove_garbage(garbage) == 0

    @promise("S-382")
    def test_a_save_whose_process_is_gone_is_dead_at_once(
        self, models: Models, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """On this machine nobody has to wait."""
        self.leave(models)
        monkeypatch.setattr(owner, "_started", lambda number: "")
        assert len(list(models.garbage("digits"))) == 1

    @promise("S-381", "S-382")
    def test_a_deletion_that_was_cut_off_is_garbage(
        self, home: Home, source: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        models = home.models()
        saved(models, source)
        everything = home.everything()
        monkeypatch.setattr(models, "tree", interrupted)
        with pytest.raises(KeyboardInterrupt):
            models.delete("digits", 1)
        monkeypatch.undo()

        assert home.everything() == everything
        [garbage] = models.garbage("digits")
        assert (garbage.number, garbage.why) == (1, "deleted")
        models.remove_garbage(garbage)
        assert [path for path in home.everything() if path.startswith("digits/")] == ["digits/1.json"]

    @promise("S-382")
    def test_foreign_files_are_never_garbage(self, home: Home, source: Path) -> None:
        """A directory that has a number for a name is somebody's data."""
        models = home.models()
        saved(models, source)
        home.put("digits/9/file", b"theirs")
        home.put("photos/2024/file", b"theirs")

        assert [list(models.garbage(name, stale_s=-1)) for name in models.names()] == [[], []]
        assert saved(models, source) == 10

    @promise("S-376", "S-382")
    def test_leftovers_of_killed_writers_are_garbage_in_every_directory(self, tmp_path: Path, source: Path) -> None:
        """Also of what serves a version, and in the root, where others have their files."""
        storage = DirectoryStorage(tmp_path)
        models = Models(storage, who="tester")
        saved(models, source)
        models.set_alias("digits", "prod", 1)
        models.add_use("digits", 1, Use(id="uid-1", who="Serving ml/digits"))
        (tmp_path / "notes").mkdir()
        (tmp_path / "notes" / "uses").write_bytes(b"a file of somebody else")
        (tmp_path / ".notes.tmp").write_bytes(b"another one")
        before = sorted(tmp_path.rglob("*"))
        for document in ("digits/1.json", "digits/aliases/prod", "digits/uses/1/uid-1", MARKER):
            at = tmp_path / document
            at.with_name(f".{at.name}.{'0' * 16}.tmp").write_bytes(b"")
            at.with_name(f".{at.name}.lock").symlink_to(f"{'0' * 16}|kernel|1:1")
        for each in tmp_path.rglob(".*"):
            os.utime(each, (time.time() - 600, time.time() - 600), follow_symlinks=False)

        assert sum(models.sweep(model) for model in models.names()) == 8
        assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("junk", [b"", b"junk\n", b'{"format":"datastore.dev/model-version/v1"}\n'])
class TestDamagedManifest:
    """One file that can't be read is named, and is in the way of nothing else."""

    @promise("S-383")
    @pytest.mark.parametrize("number", [1, 2])
    def test_a_damaged_version_is_listed_and_can_be_deleted(
        self, home: Home, source: Path, junk: bytes, number: int
    ) -> None:
        models = home.models()
        saved(models, source)
        saved(models, source)
        home.put(f"digits/{number}.json", junk)

        damaged = {each.version: str(each.damage) for each in models.versions("digits") if each.damage}
        assert list(damaged) == [number]
        assert damaged[number].endswith("; delete the version, or bring this file back from a copy")
        for read in (models.head, models.manifest):
            with pytest.raises(VersionDamaged, match=rf"digits/{number}\.json: is not a .*; delete the version"):
                read("digits", number)
            assert read("digits", 3 - number).files == 6
        assert [each.version for each in models.versions("digits")] == [2, 1]

        assert models.delete("digits", number) > 5

        assert [each.version for each in models.versions("digits")] == [3 - number]
        assert not [path for path in home.everything() if path.startswith(f"digits/{number}/")]
        with pytest.raises(ModelNotFound, match="it was deleted at 20"):
            models.head("digits", number)

    @promise("S-381")
    def test_latest_never_means_an_older_version_because_the_newest_is_damaged(
        self, home: Home, source: Path, junk: bytes
    ) -> None:
        models = home.models()
        saved(models, source)
        saved(models, source)
        home.put("digits/2.json", junk)
        with pytest.raises(VersionDamaged, match=r"digits/2\.json"):
            models.resolve(parse_reference("digits"))
        assert models.resolve(parse_reference("digits:1")) == 1

    @promise("S-381")
    def test_a_damaged_version_that_is_in_use_stays(self, home: Home, source: Path, junk: bytes) -> None:
        models = home.models()
        saved(models, source)
        models.set_alias("digits", "prod", 1)
        home.put("digits/1.json", junk)
        with pytest.raises(VersionInUse, match="the alias prod means it"):
            models.delete("digits", 1)

    @promise("S-382")
    def test_garbage_is_removed_beside_a_damaged_version_and_nothing_that_it_may_need(
        self, home: Home, source: Path, junk: bytes
    ) -> None:
        models = home.models()
        saved(models, source)
        home.put("digits/1.json", junk)
        home.put("digits/1.saving", b"{}")
        before = home.everything()
        dead = models.reserve("digits", "dead", "somewhere")

        [garbage] = models.garbage("digits", stale_s=-1)
        assert garbage.number == dead.number
        models.remove_garbage(garbage)
        assert home.everything() == sorted([*before, f"digits/{dead.number}.json"])
        assert not models.give_up(next(models.savings("digits")))

    @promise("S-374")
    @pytest.mark.parametrize("number", [1, 2])
    def test_the_next_version_is_saved(self, home: Home, source: Path, junk: bytes, number: int) -> None:
        models = home.models()
        saved(models, source)
        saved(models, source)
        home.put(f"digits/{number}.json", junk)
        for save_id in ("", "job"):
            made = save(home.models(), DirectoryTree(source), wish(force=True, save_id=save_id), Progress())
            assert made.new
        assert save(home.models(), DirectoryTree(source), wish(save_id="job"), Progress()).manifest.version == 4
        assert not save(home.models(), DirectoryTree(source), wish(), Progress()).new

    @promise("S-374")
    def test_a_damaged_newest_version_is_not_compared_with(self, home: Home, source: Path, junk: bytes) -> None:
        models = home.models()
        saved(models, source)
        home.put("digits/1.json", junk)
        made = save(models, DirectoryTree(source), wish(), Progress())
        assert (made.new, made.manifest.version) == (True, 2)

    @promise("S-397")
    def test_a_job_deletes_the_version_of_its_save_beside_a_damaged_one(
        self, tmp_path: Path, source: Path, junk: bytes
    ) -> None:
        """One that may be the damaged version itself is not taken for deleted."""
        models = Models(DirectoryStorage(tmp_path), who="tester")
        for save_id in ("one", "two"):
            saved(models, source, save_id)
        (tmp_path / "digits/2.json").write_bytes(junk)
        store = {"directory": str(tmp_path), "location": "nfs://host/models/"}
        asked = {"store": store, "who": "tester", "do": "delete", "model": "digits"}
        assert perform({**asked, "saveId": "one"}, Progress())["versions"] == 1
        assert not (tmp_path / "digits/1").exists()
        with pytest.raises(VersionDamaged, match=r"digits/2\.json"):
            perform({**asked, "saveId": "two"}, Progress())
        moved = {**asked, "do": "update", "moves": {}, "pins": {}}
        assert perform(moved, Progress())["latest"] == 2


class TestDamagedNames:
    @promise("S-383")
    def test_a_version_of_a_later_release_is_not_deleted_as_damaged(self, home: Home, source: Path) -> None:
        models = home.models()
        saved(models, source)
        home.put("digits/1.json", home.get("digits/1.json").replace(b"model-version/v1", b"model-version/v2"))
        before = home.everything()
        with pytest.raises(FormatUnknown, match="use the release that wrote it"):
            models.delete("digits", 1)
        assert home.everything() == before

    @promise("S-381", "S-383")
    def test_a_damaged_alias_can_be_removed_and_until_then_keeps_versions(self, home: Home, source: Path) -> None:
        """Nobody knows which version it meant."""
        models = home.models()
        saved(models, source)
        saved(models, source)
        models.set_alias("digits", "prod", 2)
        home.put("digits/aliases/bad", b"junk")

        assert models.aliases("digits") == {"bad": 0, "prod": 2}
        with pytest.raises(VersionInUse, match="the alias bad is damaged and may have meant it; move or remove that"):
            models.delete("digits", 1)
        models.remove_alias("digits", "bad")
        assert models.aliases("digits") == {"prod": 2}
        assert models.delete("digits", 1)


class TestServersWithoutConditions:
    @promise("S-387")
    @pytest.mark.parametrize("ignored", ["if_none_match", "if_match"])
    def test_a_server_that_ignores_conditions_is_refused(self, bucket: Home, source: Path, ignored: str) -> None:
        """Nothing is saved, and the line says where models can be kept."""

        class Ignoring(HookedStore):
            async def put(self, key: str, body: Body, options: WriteOptions) -> WriteResult:
                plain = WriteOptions(metadata=options.metadata, content_type=options.content_type)
                keeps = WriteOptions(
                    if_none_match=options.if_none_match and ignored != "if_none_match",
                    if_match=None if ignored == "if_match" else options.if_match,
                )
                return await self.inner.put(key, body, keeps if keeps.if_none_match or keeps.if_match else plain)

        models = Models(bucket.storage(Ignoring), who="tester")
        with pytest.raises(Unsupported, match=r"can't (create|replace) a file only .*conditional writes"):
            saved(models, source)
        assert bucket.everything() == [MARKER]

    @promise("S-387")
    def test_a_server_that_refuses_conditions_is_refused_in_its_words(self, bucket: Home, source: Path) -> None:

        class Refusing(HookedStore):
            async def put(self, key: str, body: Body, options: WriteOptions) -> WriteResult:
                if options.if_none_match or options.if_match:
                    raise Unsupported("PUT: server says: NotImplemented: header", key=key, status=501)
                return await self.inner.put(key, body, options)

        models = Models(bucket.storage(Refusing), who="tester")
        with pytest.raises(Unsupported, match="NotImplemented"):
            saved(models, source)

    @promise("S-387")
    def test_a_mount_of_objects_is_no_place_for_models(
        self, tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Exclusive creation holds on one machine only there."""
        device = tmp_path.stat().st_dev
        line = f"36 35 {device >> 8}:{device & 255} / / rw - fuse.s3fs s3fs rw\n"
        monkeypatch.setattr("datastore.mountinfo.MOUNTINFO", tmp_path / "mountinfo")
        (tmp_path / "mountinfo").write_text(line)
        with pytest.raises(Unsupported, match=r"mounted by s3fs.*spec\.s3"):
            saved(Models(DirectoryStorage(tmp_path)), source)

    def test_a_store_of_a_later_release_is_left_alone(self, home: Home, source: Path) -> None:
        home.put(MARKER, b'{"format": "datastore.dev/model-store/v2"}')
        said = rf"{MARKER}: says .* another layout .*: datastore\.dev/model-store/v2; use the release"
        with pytest.raises(Unsupported, match=said):
            saved(home.models(), source)

    def test_a_damaged_layout_is_named_by_its_file(self, home: Home, source: Path) -> None:
        """Removed, it is made again."""
        home.put(MARKER, b"junk")
        with pytest.raises(Unsupported, match=rf"{MARKER}: is damaged, .* remove that file") as refused:
            saved(home.models(), source)
        assert "b'" not in str(refused.value)
        home.models().storage.remove(MARKER)
        assert saved(home.models(), source) == 1


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt
