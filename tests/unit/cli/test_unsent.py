"""`datastore unsent`: what could not be uploaded is listed, saved and discarded."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import signal
import sqlite3
from pathlib import Path
from typing import IO

import pytest

from datastore.fuse.state.rows import Unsent
from datastore.fuse.state.statedb import StateDb
from datastore.mounting import unsent
from datastore.mounting.unsent import remaining
from tests.promises import promise

from .conftest import Cli, MountOutput, mounted_by_the_kernel, state_of

KEPT = "another client changed this file since it was opened (conflict: fail); what was written is kept on disk"


def leave(state_dir: Path) -> None:
    """Write the journal and bytes of a waiting, a failed and a refused file; the last one is only partly here."""
    staging = state_dir / "staging"
    staging.mkdir(exist_ok=True)
    db = StateDb(state_dir / "state.db")
    row = Unsent("", "", "", "", 0, 0, {}, "text/plain", 1_700_000_000_000_000_000)
    for name, more in {
        "a.txt": row,
        "d/b.txt": row._replace(error="403 AccessDenied"),
        "d/c.txt": row._replace(
            error=KEPT, stuck=True, base_key="d/c.txt", base_etag="x", base_length=9 << 12, base_size=9 << 12
        ),
    }.items():
        path = staging / name.replace("/", "-")
        path.write_bytes(name.encode().ljust(4096, b"."))
        os.truncate(path, max(4096, more.base_size))
        db.record_unsent(more._replace(staging=path.name, key=name))
    db.close()


@pytest.fixture
def left(root: Path, mount_output: MountOutput) -> Path:
    """Return the state directory of a mount that died with three unsent files."""
    mount_output("ready")
    state_dir = state_of(root, "output")
    leave(state_dir)
    pid = int((state_dir / "fake.pid").read_text())
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return state_dir


@promise("S-19")
def test_a_row_whose_file_was_sent_and_removed_is_no_unsent_file(cli: Cli, left: Path) -> None:
    """A server that dies leaves such rows for the next one."""
    (left / "staging" / "a.txt").unlink()
    assert [line.split()[0] for line in cli("unsent", "output").out.splitlines()] == ["PATH", "d/b.txt", "d/c.txt"]
    assert remaining(left) == 2


@promise("S-19", "S-20")
def test_a_young_file_of_a_mount_that_was_killed_is_listed(cli: Cli, left: Path) -> None:
    """Its row is only in the log; a row that the log removes does not count."""
    state = left / "other.db"
    db = StateDb(state)
    row = Unsent("y", "young\udcff", "", "", 0, 0, {}, "text/plain", 1)
    (left / "staging" / "y").write_bytes(b"young")
    (left / "staging" / "z").write_bytes(b"sent")
    db.record_unsent(row)
    db.record_unsent(row._replace(staging="z"))
    db.forget_unsent("z")
    assert [line.split()[0] for line in cli("unsent", "output").out.splitlines()][1] == "young\ufffd"
    assert remaining(left) == 4
    db.close()
    state.unlink()


@promise("S-47")
def test_unsent_lists_the_waiting_files_and_the_reasons(cli: Cli, left: Path) -> None:
    """Some are retried, others need a person's decision."""
    lines = cli("unsent", "output").out.splitlines()
    assert [line.split()[0] for line in lines] == ["PATH", "a.txt", "d/b.txt", "d/c.txt"]
    assert lines[1].endswith(" waiting")
    assert lines[2].endswith("tried again: 403 AccessDenied")
    assert lines[3].endswith(f"kept: {KEPT}")
    told = json.loads(cli("unsent", "output", "-o", "json").out)
    assert [(each["path"], each["stuck"], each["missing"]) for each in told] == [
        ("a.txt", False, 0),
        ("d/b.txt", False, 0),
        ("d/c.txt", True, 8 << 12),
    ]


@promise("S-47")
def test_unsent_saves_files_to_another_directory(cli: Cli, left: Path, tmp_path: Path) -> None:
    """Files are saved whole, nothing is overwritten, missing parts are reported, and all files stay listed."""
    saved = cli("unsent", "output", "--save", tmp_path / "saved")
    assert saved.code == 0
    assert (tmp_path / "saved/a.txt").read_bytes() == b"a.txt".ljust(4096, b".")
    assert (tmp_path / "saved/d/c.txt").stat().st_size == 9 << 12
    assert "d/c.txt is saved as" in saved.err
    assert "32 KiB of it were never changed or fetched and are zeros" in saved.err.replace("32.0", "32")
    again = cli("unsent", "output", "--save", tmp_path / "saved")
    assert again.code == 1
    assert "exists already; name another directory" in again.err
    assert len(json.loads(cli("unsent", "output", "-o", "json").out)) == 3


@promise("S-47")
def test_two_files_of_one_path_are_saved_side_by_side(cli: Cli, left: Path, tmp_path: Path) -> None:
    """The newest file gets the plain name."""
    db = StateDb(left / "state.db")
    row = Unsent("older", "a.txt", "", "", 0, 0, {}, "text/plain", 1)
    (left / "staging" / "older").write_bytes(b"older")
    db.record_unsent(row)
    db.close()
    assert cli("unsent", "output", "--save", tmp_path / "saved").code == 0
    assert (tmp_path / "saved/a.txt").read_bytes() == b"a.txt".ljust(4096, b".")
    assert (tmp_path / "saved/a.txt.older").read_bytes() == b"older"


@promise("S-47")
@pytest.mark.parametrize(("error", "code"), [(OSError(errno.ENOSPC, "full"), 1), (KeyboardInterrupt(), 130)])
def test_a_copy_that_breaks_off_is_removed(
    cli: Cli, left: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int
) -> None:
    """So the command can be repeated, and no partial file looks whole."""

    def broken(source: IO[bytes], copy: IO[bytes], length: int) -> None:
        copy.write(source.read(100))
        raise error

    with monkeypatch.context() as breaking:
        breaking.setattr(shutil, "copyfileobj", broken)
        failed = cli("unsent", "output", "--save", tmp_path / "saved")
    assert (failed.code, list((tmp_path / "saved").iterdir())) == (code, [])
    assert (f"a.txt can't be copied to {tmp_path}/saved/a.txt: full; repeat it" in failed.err) is (code == 1)
    assert cli("unsent", "output", "--save", tmp_path / "saved").code == 0


@promise("S-47")
def test_unsent_discards_files(cli: Cli, left: Path) -> None:
    """It discards the bytes and the row of one path."""
    assert cli("unsent", "output", "--discard", "d/c.txt").err == "d/c.txt is discarded\n"
    assert not (left / "staging" / "d-c.txt").exists()
    assert [each["path"] for each in json.loads(cli("unsent", "output", "-o", "json").out)] == ["a.txt", "d/b.txt"]
    missing = cli("unsent", "output", "--discard", "d/c.txt")
    assert missing.code == 1
    assert "d/c.txt: no upload of this path has failed" in missing.err


@promise("S-47")
def test_unsent_files_beyond_the_listing_are_saved_and_discarded_too(
    cli: Cli, left: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unsent, "MAX_SHOWN", 2)
    assert "d/c.txt" not in cli("unsent", "output").out
    assert cli("unsent", "output", "--save", tmp_path / "saved").code == 0
    assert (tmp_path / "saved/d/c.txt").exists()
    assert cli("unsent", "output", "--discard", "d/c.txt") == (0, "", "d/c.txt is discarded\n")
    assert remaining(left) == 2


@promise("S-47")
def test_a_living_server_discards_its_own_files(cli: Cli, root: Path, mount_output: MountOutput) -> None:
    """The command does not change the journal of a running server."""
    mount_output("ready")
    state_dir = state_of(root, "output")
    leave(state_dir)
    refused = cli("unsent", "output", "--discard", "d/c.txt")
    assert refused.code == 1
    with contextlib.closing(sqlite3.connect(state_dir / "state.db")) as journal:
        assert journal.execute("select count(*) from unsent").fetchone() == (3,)
    last = (state_dir / "asked").read_text().splitlines()[-1]
    assert json.loads(last) == {"op": "discard", "path": "d/c.txt"}


@promise("S-47", "S-196")
@pytest.mark.parametrize(
    ("storage", "words"),
    [
        ({"since": 0, "lastAsked": 1e12, "error": "refused"}, r" \(storage has not answered since 1970-.*: refused\)"),
        ({}, ""),
    ],
)
def test_a_discard_that_has_to_wait_says_why(
    cli: Cli, mount_output: MountOutput, storage: dict[str, object], words: str
) -> None:
    place = mount_output("stalled", storage)
    refused = cli("unsent", "output", "--discard", "a/b.txt")
    assert refused.code == 1
    assert re.match(
        f"error: a/b.txt: is not discarded yet, as an upload or a rename of it is under way{words}; if that fails, ",
        refused.err,
    )
    assert refused.err.endswith(f"`datastore unsent {place}` lists it until then\n")


@promise("S-47")
@pytest.mark.parametrize("kind", ["nfs", "bind"])
def test_a_kernel_mount_has_no_unsent_files(cli: Cli, root: Path, tmp_path: Path, kind: str) -> None:
    """The same holds for --retry, although there is no server to ask."""
    mounted_by_the_kernel(root, "output", tmp_path / "d", kind)
    for option in ([], ["--retry"]):
        assert cli("unsent", "output", *option) == (0, "", "everything of output is uploaded\n")


def test_only_one_of_save_and_discard_is_accepted(cli: Cli, left: Path, tmp_path: Path) -> None:
    assert cli("unsent", "output", "--discard", "a.txt", "--save", tmp_path).code == 2
