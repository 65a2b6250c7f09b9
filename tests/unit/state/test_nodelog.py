"""The log of node ids, whole and torn."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datastore.fuse.state.nodelog import NodeLog, NodeRecord
from tests.promises import promise

D = NodeRecord(2, 1, stat.S_IFDIR, "d/", b"d")
F = NodeRecord(3, 2, stat.S_IFREG, os.fsdecode(b"raw\xff"), b"raw\xff")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "nodes.log"


@pytest.fixture
def log(path: Path) -> Iterator[NodeLog]:
    opened = NodeLog(path)
    yield opened
    opened.close()


@promise("S-41")
def test_a_new_mount_begins_anew(path: Path, log: NodeLog) -> None:
    """The kernel of a fresh mount knows nothing."""
    log.append([D])
    log.rewrite([F])
    log.append([D])
    assert list(log.load().values()) == [F, D]
    log.rewrite([])
    assert log.load() == {}
    assert path.stat().st_size == 0


records = st.builds(
    NodeRecord,
    ino=st.integers(2, (1 << 53) - 1),
    parent=st.integers(1, (1 << 53) - 1),
    kind=st.sampled_from([stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK]),
    tail=st.binary(max_size=30).map(os.fsdecode),
    name=st.binary(max_size=30),
)


@promise("S-41")
@given(st.lists(records, max_size=5, unique_by=lambda record: record.ino), st.integers(0, 100))
def test_a_torn_end_is_ignored(tmp_path_factory: pytest.TempPathFactory, made: list[NodeRecord], lost: int) -> None:
    """Whatever of the last write is missing, what was whole is read."""
    path = tmp_path_factory.mktemp("log") / "nodes.log"
    log = NodeLog(path)
    sizes = []
    for record in made:
        log.append([record])
        sizes.append(path.stat().st_size)
    os.truncate(path, max(0, path.stat().st_size - lost))
    whole = sum(size <= path.stat().st_size for size in sizes)
    assert list(log.load().values()) == made[:whole]
    log.close()


@promise("S-41")
def test_what_follows_a_torn_record_is_read(path: Path, log: NodeLog) -> None:
    """A server that died while it wrote, and two after it."""
    log.append([D])
    log.append([F])
    os.truncate(path, path.stat().st_size - 1)
    second = NodeLog(path)
    assert second.load() == {2: D}
    second.append([F])
    assert second.load() == {2: D, 3: F}
    second.close()


@promise("S-41", "S-50")
def test_a_full_disk_tears_no_record(path: Path, log: NodeLog, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel hears of no id that is not written down, and what is written later is read."""
    log.append([D])
    write = os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda fd, content: write(fd, content[: len(content) // 2]))
        with pytest.raises(OSError, check=lambda error: error.errno == errno.ENOSPC):
            log.append([F])
    log.append([F._replace(name=b"later")])
    assert log.load() == {2: D, 3: F._replace(name=b"later")}
    assert log.records == 2


@promise("S-41")
def test_a_log_that_cannot_be_written_anew_stays(path: Path, log: NodeLog, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a descriptor for the new one; above all nothing is written to what has the old number by then."""
    log.append([D])

    def refuse(*_arguments: object, **_more: object) -> int:
        raise OSError(errno.EMFILE, "too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        with pytest.raises(OSError, match="too many"):
            log.rewrite([])
    log.append([F])
    assert log.load() == {2: D, 3: F}
