"""The directory beneath a mount (docs/SEMANTICS.md, S-60)."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest

from datastore import beneath
from tests.promises import promise


def protected(directory: Path, note: Path) -> None:
    fd = os.open(directory, os.O_RDONLY)
    try:
        beneath.protect(fd, note)
    finally:
        os.close(fd)


@promise("S-60")
def test_a_directory_gets_its_mode_back(tmp_path: Path) -> None:
    place, note = tmp_path / "m", tmp_path / "note"
    place.mkdir(mode=0o751)
    place.chmod(0o751)
    protected(place, note)
    assert stat.S_IMODE(place.stat().st_mode) == 0o551
    beneath.restore(str(place), note)
    assert stat.S_IMODE(place.stat().st_mode) == 0o751
    assert not note.exists()
    (place / "file").touch()
    beneath.restore(str(place), note)
    assert (place / "file").exists()


@promise("S-60")
@pytest.mark.parametrize("call", ["open", "fchmod"])
def test_a_mode_that_can_not_be_given_back_now_is_given_back_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """Also if the directory is mounted on again before that."""

    def refused(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    place, note = tmp_path / "m", tmp_path / "note"
    place.mkdir()
    place.chmod(0o751)
    protected(place, note)
    with monkeypatch.context() as refusing:
        refusing.setattr(os, call, refused)
        beneath.restore(str(place), note)
    protected(place, note)
    beneath.restore(str(place), note)
    assert stat.S_IMODE(place.stat().st_mode) == 0o751
    assert not note.exists()


@promise("S-60")
@pytest.mark.parametrize("text", ["{", "{}", "[]", '{"mode": "x"}', '{"mode": null}', '{"mode": 493}'])
def test_a_note_that_is_broken_or_of_a_directory_that_is_gone_is_dropped(tmp_path: Path, text: str) -> None:
    note = tmp_path / "note"
    for place in (tmp_path, tmp_path / "gone"):
        note.write_text(text)
        beneath.restore(str(place), note)
        assert not note.exists()


@promise("S-60")
def test_a_directory_that_somebody_made_immutable_stays_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Administrators do that with their mount points; it is not ours to undo."""
    monkeypatch.setattr(beneath, "_flags", lambda _: 0x10)
    place, note = tmp_path / "m", tmp_path / "note"
    place.mkdir()
    place.chmod(0o751)
    protected(place, note)
    assert not note.exists()
    assert stat.S_IMODE(place.stat().st_mode) == 0o751
