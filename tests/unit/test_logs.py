"""logs.py: one format, no secrets, bounded."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from datastore import logs
from datastore.logs import Formatter, Limiter, fields, redact
from tests.promises import promise


def line(message: str, **values: object) -> str:
    record = logging.LogRecord("datastore.x", logging.WARNING, "f.py", 1, message, (), None)
    record.created = 0.0
    record.__dict__.update(fields(**values))
    return Formatter().format(record)


def test_a_line_is_time_level_logger_message_and_fields() -> None:
    assert line("it ended", code=1, key=b"a b\xff") == (
        "1970-01-01T00:00:00Z WARNING datastore.x it ended code=1 key='a b\\xff'"
    )
    assert "\n" not in line("x", text="one\ntwo"), "a field can't start one"


@pytest.mark.parametrize(
    "text",
    [
        "GET /b?X-Amz-Signature=deadbeef&x=1",
        "Authorization: AWS4-HMAC-SHA256 Credential=AKIA/deadbeef",
        "aws_secret_access_key = deadbeef",
        '{"secret_key": "deadbeef"}',
        "session_token='deadbeef'",
        "password=deadbeef",
    ],
)
def test_texts_that_look_like_a_secret_are_not_logged(text: str) -> None:
    assert "deadbeef" not in redact(text)


def test_ordinary_words_are_left_alone() -> None:
    assert redact("the signature does not match: check the clock") == "the signature does not match: check the clock"


def test_a_log_over_its_limit_starts_anew_and_keeps_one_older(tmp_path: Path) -> None:
    path = tmp_path / "mount.log"
    logs.trim(path, 10)
    with path.open("ab", buffering=0) as writer:
        writer.write(b"0123456789")
        logs.trim(path, 10)
        assert path.read_bytes() == b"0123456789"
        writer.write(b"!")
        logs.trim(path, 10)
        writer.write(b"new")
    assert (path.read_bytes(), (tmp_path / "mount.log.1").read_bytes()) == (b"new", b"0123456789!")


@promise("S-153")
def test_a_log_that_a_full_disk_does_not_let_move_stays_whole(tmp_path: Path) -> None:
    path = tmp_path / "mount.log"
    path.write_bytes(b"0123456789!")
    older = tmp_path / "mount.log.1"
    older.symlink_to("/dev/full")
    logs.trim(path, 10)
    assert path.read_bytes() == b"0123456789!"
    older.unlink()
    logs.trim(path, 10)
    assert path.read_bytes() == b""


def test_one_line_per_key_and_interval() -> None:
    limiter = Limiter(10.0)
    assert [limiter.allows("a", now) for now in (0.0, 5.0, 10.0)] == [True, False, True]
    assert limiter.allows("b", 0.0)
    assert all(limiter.allows(number, 0.0) for number in range(1000))
