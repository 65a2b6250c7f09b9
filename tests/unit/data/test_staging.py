"""A staged file against a plain bytearray, over a base that is fetched in pieces."""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from datastore.fuse.data.staging import BLOCK, StagedFile
from datastore.fuse.store.base import ETag, ObjectVersion
from tests.promises import promise

MOST = 6 * BLOCK
sizes = st.integers(0, MOST) | st.sampled_from([0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 3 * BLOCK + 7])


def base_of(size: int) -> bytes:
    """Bytes in which each place is another."""
    return bytes(1 + (place * 31 + place // 251) % 255 for place in range(size))


def fill(staged: StagedFile, start: int, content: bytes) -> None:
    """Write bytes of the base into a file, as Delivery does."""
    staged.put(start, content)
    staged.present.add(start, start + len(content))


class StagedMachine(RuleBasedStateMachine):
    """Writes, cuts, zeroes, uploads and deaths; after each step every byte is the model's."""

    def __init__(self) -> None:
        super().__init__()
        self._directory = TemporaryDirectory()
        self.path = Path(self._directory.name, "staged")
        self.staged: StagedFile | None = None
        self.base = b""
        self.model = bytearray()

    @property
    def file(self) -> StagedFile:
        assert self.staged is not None
        return self.staged

    @initialize(size=sizes, has_base=st.booleans())
    def begin(self, size: int, has_base: bool) -> None:
        self.base = base_of(size) if has_base else b""
        version = ObjectVersion("f", ETag("v0"), len(self.base)) if has_base else None
        self.staged = StagedFile(self.path, version, 0)
        self.model = bytearray(self.base)

    def fill(self, gaps: list[tuple[int, int]]) -> None:
        """As Uploads.fill() does it."""
        for start, stop in gaps:
            assert stop <= len(self.base)
            fill(self.file, start, self.base[start:stop])

    @rule(offset=sizes, content=st.binary(min_size=1, max_size=BLOCK + 2))
    def write(self, offset: int, content: bytes) -> None:
        self.fill(self.file.missing_for_write(offset, len(content)))
        assert self.file.write(offset, content) == len(content)
        if len(self.model) < offset:
            self.model.extend(bytes(offset - len(self.model)))
        self.model[offset : offset + len(content)] = content

    @rule(size=sizes)
    def truncate(self, size: int) -> None:
        if 0 < size < self.file.size:
            self.fill(self.file.missing(size - size % BLOCK, size))
        self.file.truncate(size)
        del self.model[size:]
        self.model.extend(bytes(size - len(self.model)))

    @rule(offset=sizes, length=st.integers(1, MOST))
    def zero(self, offset: int, length: int) -> None:
        self.fill(self.file.missing_for_write(offset, length))
        stop = min(offset + length, len(self.model))
        if offset < stop:
            self.file.write(offset, bytes(stop - offset))
            self.model[offset:stop] = bytes(stop - offset)

    @rule(offset=sizes, size=st.integers(1, MOST))
    def read(self, offset: int, size: int) -> None:
        self.fill(self.file.missing(offset, min(offset + size, self.file.size)))
        assert self.file.read(offset, size) == self.model[offset : offset + size]

    @rule()
    def upload(self) -> None:
        for start, stop in self.file.dirty_ranges:
            assert self.file.read(start, stop - start) == self.model[start:stop]
        self.base = bytes(self.model)
        self.file.uploaded(ObjectVersion("f", ETag("v1"), len(self.base)))
        assert not self.file.dirty

    @rule()
    def die(self) -> None:
        """The next process has the file on disk, and what the journal says of its base."""
        version, base_size = self.file.base, self.file.base_size
        self.file.dirty = True
        self.file.close(remove=False)
        self.staged = StagedFile.recovered(self.path, version, base_size, 0)
        assert self.staged.dirty

    @invariant()
    def sizes_agree(self) -> None:
        if self.staged is None:
            return
        assert self.file.size == len(self.model) == os.fstat(self.file.fd).st_size
        assert self.file.base_size <= self.file.size

    @invariant()
    def every_byte_is_here_in_the_base_or_zero(self) -> None:
        if self.staged is None:
            return
        expected = bytearray(os.pread(self.file.fd, self.file.size, 0))
        for start, stop in self.file.missing(0, self.file.size):
            expected[start:stop] = self.base[start:stop]
        assert expected == self.model

    @invariant()
    def dirty_is_held(self) -> None:
        if self.staged is None:
            return
        for start, stop in self.file.dirty_ranges:
            assert stop <= self.file.size
            assert self.file.present.contains(start, stop)

    def teardown(self) -> None:
        if self.staged is not None:
            self.staged.close(remove=True)
        self._directory.cleanup()


TestStagedFile = StagedMachine.TestCase
TestStagedFile.settings = settings(
    max_examples=60, stateful_step_count=25, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "staged"


def version(size: int) -> ObjectVersion:
    return ObjectVersion("f", ETag("v0"), size)


@promise("S-21")
def test_nothing_is_fetched_for_whole_blocks(path: Path) -> None:
    """Only partly written blocks need the base."""
    staged = StagedFile(path, version(10 * BLOCK), 0)
    assert staged.missing_for_write(BLOCK, 2 * BLOCK) == []
    assert staged.missing_for_write(BLOCK + 1, BLOCK) == [(BLOCK, 2 * BLOCK), (2 * BLOCK, 3 * BLOCK)]
    assert sorted(staged.missing_for_write(5, 10)) == [(0, BLOCK)]
    assert staged.missing_for_write(10 * BLOCK, 5) == []
    assert staged.missing_for_write(20 * BLOCK + 3, 5) == []
    staged.close(remove=True)


@promise("S-17")
def test_what_was_written_meanwhile_stays(path: Path) -> None:
    """A range that arrives late does not overwrite newer bytes."""
    staged = StagedFile(path, version(BLOCK), 0)
    staged.write(0, b"new")
    fill(staged, 0, b"o" * BLOCK)
    assert staged.read(0, 5) == b"newoo"
    assert staged.complete
    staged.close(remove=True)


@promise("S-20")
def test_a_short_read_leaves_whole_blocks(path: Path) -> None:
    """After a death, bytes beside those that a read fetched are still known to be the base's."""
    base = base_of(2 * BLOCK + 5)
    staged = StagedFile(path, version(len(base)), 0)
    assert staged.missing(BLOCK + 5, BLOCK + 6) == [(BLOCK, 2 * BLOCK)]
    assert staged.missing(2 * BLOCK, 2 * BLOCK + 1) == [(2 * BLOCK, 2 * BLOCK + 5)]
    fill(staged, BLOCK, base[BLOCK : 2 * BLOCK])
    staged.close(remove=False)
    left = StagedFile.recovered(path, version(len(base)), len(base), 0)
    assert left.read(BLOCK, BLOCK) == base[BLOCK : 2 * BLOCK]
    assert left.missing(0, left.size) == [(0, BLOCK), (2 * BLOCK, 2 * BLOCK + 5)]
    left.close(remove=True)


@promise("S-20")
def test_what_an_earlier_process_left(path: Path) -> None:
    """What the file holds is found by itself; the rest is the base's or zero."""
    staged = StagedFile(path, version(10 * BLOCK), 0)
    staged.write(2 * BLOCK, b"x" * BLOCK)
    staged.truncate(8 * BLOCK)
    staged.truncate(20 * BLOCK)
    staged.write(15 * BLOCK, b"y" * 10)
    staged.close(remove=False)
    left = StagedFile.recovered(path, version(10 * BLOCK), staged.base_size, 5)
    assert (left.size, left.base_size, left.since_ns) == (20 * BLOCK, 8 * BLOCK, 5)
    assert left.missing(0, left.size) == [(0, 2 * BLOCK), (3 * BLOCK, 8 * BLOCK)]
    assert left.read(2 * BLOCK, BLOCK) == b"x" * BLOCK
    assert left.read(15 * BLOCK, 12) == b"y" * 10 + b"\0\0"
    assert list(left.dirty_ranges) == [(2 * BLOCK, 3 * BLOCK), (15 * BLOCK, 16 * BLOCK)]
    left.close(remove=True)
    left.close(remove=True)
    assert not path.exists()


@promise("S-19")
def test_only_the_owner_reads_it(path: Path) -> None:
    """Unsent bytes on disk are nobody else's."""
    staged = StagedFile(path, None, 0)
    assert path.stat().st_mode & 0o777 == 0o600
    staged.close(remove=True)


@promise("S-50")
def test_a_new_file_is_not_cut_to_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ext4 writes a file that was truncated to 0 to the disk when it is closed, which nobody asked for."""
    sizes: list[int] = []
    monkeypatch.setattr(os, "ftruncate", lambda _fd, size: sizes.append(size))
    staged = StagedFile(tmp_path / "s", None, 1)
    staged.truncate(0)
    staged.write(0, b"bytes")
    assert sizes == []
    staged.truncate(2)
    staged.truncate(0)
    assert sizes == [2, 0]
    staged.close(remove=True)
