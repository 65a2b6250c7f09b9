"""One suite for every storage of models: what datastore/models/storage.py promises, on a directory and on each bucket.

What two machines do at the same time is done here by several clients at the same time, in processes of their own
where the storage is shared by processes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

import pytest

from datastore.errors import AlreadyExists, NotFound, PreconditionFailed, Unsupported
from datastore.models.directory import DirectoryStorage
from datastore.models.errors import SourceChanged, VersionDamaged
from datastore.models.manifest import Entry
from datastore.models.storage import CHUNK_BYTES, Name, Storage, Tag, Tree
from tests.modelstores import Home, directory_home, memory_home, server_home
from tests.promises import promise
from tests.servers import Server

CLIENTS = 8
ROUNDS = 25


@pytest.fixture(params=["directory", "memory", "moto", "versitygw", "minio"])
def home(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Home]:
    with ExitStack() as stack:
        if request.param == "directory":
            made = stack.enter_context(directory_home(tmp_path))
        elif request.param == "memory":
            made = stack.enter_context(memory_home())
        else:
            made = stack.enter_context(server_home(request.getfixturevalue(request.param)))
        yield made


@pytest.fixture
def storage(home: Home) -> Storage:
    return home.storage()


def increment(storage: Storage, times: int) -> None:
    """As whoever has to try it until nobody was faster."""
    for _ in range(times):
        while True:
            body, tag = storage.read("m/counter")
            try:
                storage.replace("m/counter", b"%d" % (int(body) + 1), tag)
                break
            except PreconditionFailed:
                continue


def write(tree: Tree, path: str, body: bytes) -> None:
    with tree.write(path, 0o644, len(body)) as sink:
        sink.write(body)


class TestDocuments:
    @promise("S-373", "S-380")
    def test_a_document_is_created_once_and_replaced_in_the_state_that_was_read(self, storage: Storage) -> None:
        first = storage.create("m/aliases/prod", b"1\n")
        assert storage.read("m/aliases/prod") == (b"1\n", first)
        with pytest.raises(AlreadyExists):
            storage.create("m/aliases/prod", b"2\n")
        second = storage.replace("m/aliases/prod", b"2\n", first)
        with pytest.raises(PreconditionFailed):
            storage.replace("m/aliases/prod", b"3\n", first)
        assert storage.read("m/aliases/prod") == (b"2\n", second)

    def test_a_document_that_is_gone_is_not_replaced(self, storage: Storage) -> None:
        tag = storage.create("m/1.json", b"{}")
        storage.remove("m/1.json")
        storage.remove("m/1.json")
        with pytest.raises(PreconditionFailed):
            storage.replace("m/1.json", b"{}", tag)
        with pytest.raises(NotFound):
            storage.read("m/1.json")
        with pytest.raises(NotFound):
            storage.age_s("m/1.json")

    def test_a_part_of_a_document_is_read(self, storage: Storage) -> None:
        storage.create("m/1.json", b"0123456789")
        assert storage.read("m/1.json", 4).body == b"0123"
        assert storage.read("m/1.json", 100).body == b"0123456789"

    def test_a_large_document_is_read_whole(self, storage: Storage) -> None:
        """The manifest of 100,000 files."""
        body = os.urandom(1 << 20) * 17
        tag = storage.create("m/1.json", body)
        assert storage.read("m/1.json") == (body, tag)
        storage.create("m/2.json", b"")
        assert storage.read("m/2.json").body == b""

    def test_the_age_is_counted_by_the_clock_of_the_storage(self, storage: Storage) -> None:
        before = time.monotonic()
        storage.create("m/1.saving", b"{}")
        assert 0 <= storage.age_s("m/1.saving") <= time.monotonic() - before + 3

    def test_names_tell_documents_from_directories(self, storage: Storage) -> None:
        assert storage.names("m") == []
        storage.create("m/7.json", b"{}")
        storage.create("m/aliases/prod", b"7")
        tree = storage.tree("m/7")
        tree.begin()
        write(tree, "f", b"x")
        assert sorted(storage.names("m")) == [Name("7", True), Name("7.json", False), Name("aliases", True)]
        assert sorted(storage.names("")) == [Name("m", True)]

    @promise("S-373")
    def test_of_clients_that_create_at_once_one_does(self, home: Home) -> None:
        storages = [home.storage() for _ in range(CLIENTS)]

        def create(number: int, path: str) -> bool:
            try:
                storages[number].create(path, b"%d" % number)
            except AlreadyExists:
                return False
            return True

        with ThreadPoolExecutor(CLIENTS) as pool:
            for turn in range(ROUNDS):
                path = f"m/{turn}.saving"
                won = list(pool.map(create, range(CLIENTS), [path] * CLIENTS))
                assert won.count(True) == 1
                assert home.storage().read(path).body == b"%d" % won.index(True)

    @promise("S-380")
    def test_of_clients_that_replace_at_once_none_overwrites_another(self, home: Home) -> None:
        """Every increment of a counter is kept, however often it was tried."""
        storages = [home.storage() for _ in range(CLIENTS)]
        storages[0].create("m/counter", b"0")

        with ThreadPoolExecutor(CLIENTS) as pool:
            list(pool.map(increment, storages, [5] * CLIENTS))
        assert storages[0].read("m/counter").body == b"%d" % (CLIENTS * 5)


class TestTrees:
    @promise("S-378")
    def test_a_tree_reads_back_as_it_was_written(self, storage: Storage) -> None:
        entries = [
            Entry("assets", "directory", 0o755),
            Entry("big", "file", 0o600, CHUNK_BYTES + 5),
            Entry("closed", "directory", 0o750),
            Entry("closed/none", "file", 0o644, 0),
            Entry("latest", "symlink", target="closed/none"),
            Entry("n" * 255, "file", 0o755, 3),
        ]
        content = {"big": bytes(CHUNK_BYTES) + b"12345", "closed/none": b"", "n" * 255: b"abc"}
        tree = storage.tree("m/1")
        tree.begin()
        for entry in entries:
            if entry.kind == "directory":
                tree.make(entry, bare=entry.path == "assets")
        for path, body in content.items():
            entry = next(each for each in entries if each.path == path)
            with tree.write(path, entry.mode, entry.size) as sink:
                for start in range(0, len(body), CHUNK_BYTES):
                    sink.write(body[start : start + CHUNK_BYTES])
        tree.make(entries[4], bare=False)
        tree.settle(entries)

        again = storage.tree("m/1")
        nodes = {node.path: node for node in again.scan()}
        assert [*nodes] == [entry.path for entry in entries]
        for entry in entries:
            node = nodes[entry.path]
            assert (node.kind, node.target, node.size) == (entry.kind, entry.target, entry.size)
            if entry.kind == "file":
                piece = again.read(node, 0, entry.size)
                assert bytes(piece.body) == content[entry.path]
                assert piece.mode & 0o7777 == entry.mode
            elif entry.kind == "directory":
                assert node.mode == entry.mode
        assert bytes(again.read(nodes["big"], CHUNK_BYTES, CHUNK_BYTES + 5).body) == b"12345"

        assert again.remove() >= 4
        assert again.remove() == 0
        with pytest.raises(NotFound):
            again.scan()

    def test_what_was_not_written_is_noticed_at_the_end(self, storage: Storage) -> None:
        tree = storage.tree("m/1")
        tree.begin()
        for path in ("a", "b"):
            write(tree, path, b"x")
        with pytest.raises(VersionDamaged, match="m/1/b: was not saved"):
            tree.settle([Entry("a", "file", 0o644, 1)])
        with pytest.raises(VersionDamaged, match="m/1/c: is missing"):
            tree.settle([Entry(name, "file", 0o644, 1) for name in "abc"])

    @promise("S-376")
    @pytest.mark.parametrize("size", [3, CHUNK_BYTES * 2 + 1])
    def test_a_file_that_was_not_written_to_its_end_is_not_there(self, home: Home, size: int) -> None:
        tree = home.storage().tree("m/1")
        tree.begin()

        def fail() -> None:
            with tree.write("f", 0o644, size) as sink:
                sink.write(bytes(min(size, CHUNK_BYTES)))
                raise RuntimeError

        with pytest.raises(RuntimeError):
            fail()
        assert home.everything() == []

    @promise("S-375")
    def test_a_file_that_changed_since_the_scan_is_not_read(self, home: Home) -> None:
        tree = home.storage().tree("m/1")
        tree.begin()
        write(tree, "f", b"one")
        [node] = tree.scan()
        home.put("m/1/f", b"two")
        with pytest.raises(SourceChanged, match="f"):
            tree.read(node, 0, 3)


@promise("S-373")
@pytest.mark.parametrize("name", ["directory", "moto", "versitygw", "minio"])
def test_twenty_saves_at_once_get_twenty_numbers(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """From four processes, each save with a client of its own; none is lost."""
    with ExitStack() as stack:
        if name == "directory":
            home, where = stack.enter_context(directory_home(tmp_path)), str(tmp_path)
        else:
            server: Server = request.getfixturevalue(name)
            home = stack.enter_context(server_home(server))
            where = json.dumps({"server": asdict(server), "suffix": home.suffix})
        home.storage()
        command = [sys.executable, "-m", "tests.contract.savers", where, "5"]
        savers = [
            subprocess.Popen([*command, str(number)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            for number in range(4)
        ]
        for each in savers:
            assert each.stdin is not None
            each.stdin.write("go\n")
            each.stdin.flush()
        numbers = [int(number) for each in savers for number in each.communicate(timeout=500)[0].split()]

        assert [each.returncode for each in savers] == [0] * 4
        assert sorted(numbers) == list(range(1, 21))
        models = home.models()
        assert [each.version for each in models.versions("digits")] == list(range(20, 0, -1))
        assert not any(there.saving for there in models.numbers("digits").values())


INCREMENT = """
import sys
from datastore.models.directory import DirectoryStorage
from tests.contract.test_model_storage import increment

increment(DirectoryStorage(sys.argv[1]), 20)
"""


class TestDirectory:
    """What only a directory has: locks, and who dies with one."""

    def test_processes_lose_no_increment(self, tmp_path: Path) -> None:
        DirectoryStorage(tmp_path).create("m/counter", b"0")
        workers = [subprocess.Popen([sys.executable, "-c", INCREMENT, str(tmp_path)]) for _ in range(4)]
        assert [each.wait(500) for each in workers] == [0] * 4
        assert DirectoryStorage(tmp_path).read("m/counter").body == b"80"
        assert os.listdir(tmp_path / "m") == ["counter"]

    @promise("S-376")
    def test_a_dead_owner_of_a_lock_is_waited_for_and_then_passed(self, tmp_path: Path) -> None:
        storage = DirectoryStorage(tmp_path, stale_s=2)
        tag = storage.create("m/alias", b"1")
        (tmp_path / "m" / ".alias.dead.tmp").write_bytes(b"9")
        os.symlink("dead", tmp_path / "m" / ".alias.lock")
        began = time.monotonic()
        storage.replace("m/alias", b"2", tag)
        assert time.monotonic() - began >= 1
        assert storage.read("m/alias").body == b"2"
        assert os.listdir(tmp_path / "m") == ["alias"], "the sleeper's file is gone, so it can't rename it any more"

    @promise("S-380")
    def test_an_owner_that_only_slept_starts_again(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Its lock was broken while it slept in front of the rename; it compares again, and gives up."""
        sleeper, other = DirectoryStorage(tmp_path, stale_s=60), DirectoryStorage(tmp_path, stale_s=2)
        tag = sleeper.create("m/alias", b"1")
        real = os.rename
        slept: list[bool] = []

        def rename(source: object, target: object) -> None:
            if str(target).endswith("/alias") and not slept:
                slept.append(True)
                other.replace("m/alias", b"other", tag)
            real(source, target)  # type: ignore[arg-type]

        monkeypatch.setattr(os, "rename", rename)
        with pytest.raises(PreconditionFailed):
            sleeper.replace("m/alias", b"sleeper", tag)
        assert other.read("m/alias").body == b"other"

    @promise("S-380")
    def test_a_file_system_without_a_word_for_it_exists(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """SFTP answers a link that is there already by a mere failure, which sshfs shows as EPERM."""
        storages = [DirectoryStorage(tmp_path) for _ in range(CLIENTS)]
        storages[0].create("m/counter", b"0")
        real = os.symlink

        def symlink(source: str, target: Path) -> None:
            try:
                real(source, target)
            except FileExistsError:
                raise PermissionError(1, "Operation not permitted") from None

        monkeypatch.setattr(os, "symlink", symlink)
        with ThreadPoolExecutor(CLIENTS) as pool:
            list(pool.map(increment, storages, [3] * CLIENTS))
        assert storages[0].read("m/counter").body == b"24"

    @promise("S-387")
    def test_a_file_system_without_links_is_refused(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:

        def symlink(source: str, target: Path) -> None:
            raise OSError(95, "Operation not supported")

        monkeypatch.setattr(os, "symlink", symlink)
        with pytest.raises(Unsupported, match="Operation not supported"):
            DirectoryStorage(tmp_path).create("m/1.json", b"{}")

    @promise("S-382")
    def test_what_dead_writers_left_is_swept_when_nobody_can_want_it(self, tmp_path: Path) -> None:
        storage = DirectoryStorage(tmp_path)
        storage.create("m/alias", b"1")
        young = f".alias.{'b' * 16}.tmp"
        dead = [f".alias.{'a' * 16}.tmp", f".alias.{'a' * 16}.broken", ".alias.lock"]
        of_others = [".notes.tmp", ".notes.lock", ".session.lock"]
        for name in (*dead, young, *of_others):
            at = tmp_path / "m" / name
            if name == ".alias.lock":
                at.symlink_to(f"{'a' * 16}|kernel|1:1")
            elif name == ".session.lock":
                at.symlink_to("elsewhere")
            else:
                at.write_bytes(b"")
        for name in (*dead, *of_others, "alias"):
            os.utime(tmp_path / "m" / name, (time.time() - 600, time.time() - 600), follow_symlinks=False)
        assert storage.sweep("m") == 3
        assert sorted(os.listdir(tmp_path / "m")) == sorted([young, *of_others, "alias"])

    def test_a_writer_that_ends_meanwhile_does_not_end_a_sweep(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        storage = DirectoryStorage(tmp_path)
        storage.create("m/alias", b"1")
        monkeypatch.setattr(os, "listdir", lambda _: [f".alias.{'a' * 16}.tmp", "alias"])
        assert storage.sweep("m") == 0

    def test_a_wrong_tag_is_refused(self, tmp_path: Path) -> None:
        storage = DirectoryStorage(tmp_path)
        storage.create("a", b"1")
        with pytest.raises(PreconditionFailed):
            storage.replace("a", b"2", Tag("0" * 32))
