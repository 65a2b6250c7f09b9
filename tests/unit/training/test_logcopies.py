"""datastore.training.local.logcopies: the whole log of a replica in a Datastore, here a directory (S-338)."""

from __future__ import annotations

from pathlib import Path

import pytest

from datastore.training.local import cgroups, replica
from datastore.training.local.isolation import Container
from datastore.training.local.logcopies import LogCopies
from datastore.training.local.replica import Replica
from datastore.training.topology import Task
from tests.promises import promise

MIB = 1 << 20


def copy(source: Path, target: Path, more: bytes) -> None:
    """One run of a replica that writes this: the log is copied, and what is too old is given back to the disk."""
    copies = LogCopies({source: target})
    with source.open("ab") as log:
        log.write(more)
    assert copies.stop() == ""
    isolation = Container(engine="", shown={}, working_dir=None)
    ran = Replica(
        task=Task(role="worker", index=0), log_path=source, isolation=isolation, group=cgroups.Parents().group("")
    )
    ran.trim_log(copies.copied(source))


@promise("S-338")
def test_a_copy_goes_on_after_a_suspension(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the disk has no more is in the copy only. The copy of an earlier job with this name is replaced."""
    monkeypatch.setattr(replica, "MAX_LOG_BYTES", MIB)
    source, target = tmp_path / "worker-0.log", tmp_path / "there" / "worker-0.log"
    target.parent.mkdir()
    target.write_bytes(b"of an earlier job\n" * MIB)
    copy(source, target, b"first\n" * MIB)
    assert source.read_bytes()[:5] == bytes(5)
    copy(source, target, b"second\n")
    copy(source, target, b"third\n")
    copied = target.read_bytes()
    assert copied.count(0) == 0
    assert copied.count(b"first\n") == MIB
    assert copied[-19:] == b"first\nsecond\nthird\n"
    assert len(copied) == source.stat().st_size
