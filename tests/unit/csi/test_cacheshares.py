"""csi/cacheshares.py: how much of the disk each volume's cache gets."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datastore import cacheusage
from datastore.csi import cacheshares
from datastore.csi.cacheshares import Cache, CacheShares, fair_shares, shares_of
from datastore.csi.request import key_of
from datastore.csi.settings import Settings
from tests.promises import promise

GIB = 1 << 30
WISHES = st.dictionaries(st.text(max_size=3), st.integers(0, 1000), max_size=6)


@promise("S-206")
@given(st.integers(-5, 3000), WISHES)
def test_no_volume_gets_less_than_an_equal_share_unless_it_wants_less(total: int, wanted: dict[str, int]) -> None:
    shares = fair_shares(total, wanted)
    assert shares.keys() == wanted.keys()
    assert sum(shares.values()) <= max(0, total)
    for name, wish in wanted.items():
        assert shares[name] <= wish
        assert shares[name] >= min(wish, max(0, total) // len(wanted))


@given(
    st.integers(0, 3000),
    st.dictionaries(st.text(max_size=3), st.builds(Cache, st.integers(0, 900), st.integers(0, 900)), max_size=6),
)
def test_all_of_the_space_is_given_out(total: int, caches: dict[str, Cache]) -> None:
    shares = shares_of(total, caches, 1000)
    assert all(shares[name] <= each.limit for name, each in caches.items())
    limits = sum(each.limit for each in caches.values())
    assert min(total, limits) - len(caches) ** 2 <= sum(shares.values()) <= total


@promise("S-206")
def test_a_volume_that_uses_much_leaves_another_its_part() -> None:
    caches = {"greedy": Cache(95 * GIB, 900 * GIB), "new": Cache(0, 10 * GIB), "small": Cache(GIB, 2 * GIB)}
    shares = shares_of(100 * GIB, caches, 100 * GIB)
    assert shares == {"greedy": 96 * GIB, "new": 2 * GIB, "small": 2 * GIB}


class Node:
    """A node with a disk that other programs use too."""

    def __init__(
        self, root: Path, monkeypatch: pytest.MonkeyPatch, node_bytes: int, disk_bytes: int, volume_bytes: int = 1000
    ) -> None:
        self.settings = Settings(
            node_id="n", plugin_dir=root, cache_node_bytes=node_bytes, cache_volume_bytes=volume_bytes
        )
        self.settings.cache_dir.mkdir()
        self.shares = CacheShares(self.settings)
        self.others = 0
        self._used: dict[Path, int] = {}
        self._disk = disk_bytes
        monkeypatch.setattr(os, "statvfs", self._statvfs)
        monkeypatch.setattr(cacheshares, "LEAST_BYTES", 0)

    def uses(self, volume_id: str, size: int, *, noted: int | None = None, used_at: float = 1000.0) -> Path:
        directory = self.settings.cache_dir / key_of(volume_id)
        directory.mkdir(exist_ok=True)
        (directory / cacheusage.NAME).write_bytes(cacheusage.COUNT.pack(size if noted is None else noted))
        self._used[directory] = size
        os.utime(directory / cacheusage.NAME, (used_at, used_at))
        return directory

    def _statvfs(self, path: Any) -> Any:
        assert path == self.settings.cache_dir
        used = sum(self._used.get(each, 0) for each in self.settings.cache_dir.iterdir())

        class Disk:
            f_frsize, f_blocks, f_bavail = 1, self._disk, self._disk - used - self.others

        return Disk


@promise("S-206")
def test_all_volumes_together_stay_below_the_nodes_ceiling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A volume that was alone gives space to later ones."""
    node = Node(tmp_path, monkeypatch, 100, 1000)
    assert node.shares.admit("a", 900) == 100
    node.uses("a", 100)
    assert node.shares.admit("b", 900) == 2
    mounted = {"a": 100, "b": 2}
    for _ in range(30):
        for volume_id, size in node.shares.round(mounted):
            node.shares.give(volume_id, size)
            mounted[volume_id] = size
        assert sum(mounted.values()) <= 100
        for volume_id, size in mounted.items():
            node.uses(volume_id, size)
    assert mounted == {"a": 50, "b": 50}


@promise("S-207")
def test_a_full_disk_leaves_each_volume_a_little(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(tmp_path, monkeypatch, 100, 1000)
    monkeypatch.setattr(cacheshares, "LEAST_BYTES", 10)
    for name in ("a", "b"):
        node.uses(name, 0)
        node.shares.admit(name, 900)
    node.others = 1000
    assert sorted(node.shares.round({"a": 100, "b": 100})) == [("a", 10), ("b", 10)]


@promise("S-206")
def test_shrinking_shares_are_applied_before_growing_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At no moment do all shares together exceed the node's limit."""
    node = Node(tmp_path, monkeypatch, 100, 1000)
    for name, used in (("a", 90), ("b", 2), ("c", 8)):
        node.uses(name, used)
        node.shares.admit(name, 60)
    changes = node.shares.round({"a": 60, "b": 20, "c": 20})
    node.uses("b", 60)
    node.uses("c", 60)
    changes = node.shares.round({"a": 60, "b": 20, "c": 20})
    now = {"a": 60, "b": 20, "c": 20}
    order = [size - now[name] for name, size in changes]
    assert order == sorted(order)
    assert changes


@promise("S-207")
def test_caches_shrink_when_the_disk_runs_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """15 % of the disk stay free, whoever fills it."""
    node = Node(tmp_path, monkeypatch, 50, 100)
    node.uses("a", 40)
    assert node.shares.admit("a", 50) == 50
    node.others = 30
    assert dict(node.shares.round({"a": 50})).get("a", 50) == 50
    node.others = 55
    assert dict(node.shares.round({"a": 50}))["a"] == 30
    node.others = 99
    assert dict(node.shares.round({"a": 50}))["a"] == 0


@promise("S-206")
def test_the_cache_of_an_unmounted_volume_stays_until_space_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = Node(tmp_path, monkeypatch, 100, 1000)
    old, young = node.uses("old", 40, used_at=1.0), node.uses("young", 40, used_at=2.0)
    node.uses("a", 10)
    node.shares.admit("a", 60)
    node.shares.round({"a": 60})
    assert (old.exists(), young.exists()) == (True, True)
    node.uses("a", 50)
    node.shares.round({"a": 60})
    assert (old.exists(), young.exists()) == (False, True)


def test_the_cache_of_a_volume_that_is_being_mounted_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(tmp_path, monkeypatch, 100, 1000)
    coming = node.uses("coming", 90)
    node.uses("a", 90)
    node.shares.admit("coming", 90)
    node.shares.round({"a": 90})
    assert coming.exists()


@promise("S-84")
def test_the_cache_of_an_inline_volume_is_removed_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(tmp_path, monkeypatch, 100, 1000)
    inline, claimed = node.uses("csi-1", 10), node.uses("team/data/1", 10)
    node.shares.leave("csi-1", for_good=True)
    node.shares.leave("team/data/1", for_good=False)
    assert (inline.exists(), claimed.exists()) == (False, True)
    assert [each.name for each in node.settings.cache_dir.iterdir()] == [claimed.name]


@promise("S-217")
def test_a_hacked_servers_usage_note_takes_no_space_from_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Caches of mounted volumes, and of volumes that may return, stay."""
    node = Node(tmp_path, monkeypatch, 100, 1000, volume_bytes=60)
    old, lying = node.uses("old", 10, used_at=1.0), node.uses("lying", 5, noted=1 << 62, used_at=2.0)
    node.uses("a", 10)
    node.shares.admit("a", 60)
    assert dict(node.shares.round({"a": 30})).get("a", 30) >= 30
    assert old.exists()
    assert lying.exists()


@promise("S-217")
def test_a_cache_is_removed_however_deep_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(tmp_path, monkeypatch, 100, 1000)
    here = os.open(node.uses("csi-1", 10), os.O_RDONLY | os.O_DIRECTORY)
    for _ in range(2 * sys.getrecursionlimit()):
        os.mkdir("d", dir_fd=here)
        below = os.open("d", os.O_RDONLY | os.O_DIRECTORY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)
    node.shares.leave("csi-1", for_good=True)
    assert list(node.settings.cache_dir.iterdir()) == []


def test_a_directory_that_is_no_cache_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The removal was cut off when the plugin ended."""
    node = Node(tmp_path, monkeypatch, 100, 1000)
    (node.settings.cache_dir / ".going-x").mkdir()
    (node.settings.cache_dir / "objects").mkdir()
    node.shares.round({})
    assert list(node.settings.cache_dir.iterdir()) == []
