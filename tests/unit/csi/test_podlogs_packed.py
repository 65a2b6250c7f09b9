"""A log that the kubelet is just packing is read once."""

from __future__ import annotations

import gzip
from pathlib import Path

from datastore.csi.podlogs import _earlier


def test_what_is_being_packed_is_read_once(tmp_path: Path) -> None:
    """The packed file stands beside what it was made of for a moment, and another one is half written."""
    old, newer = (tmp_path / f"0.log.20260101-00000{number}" for number in range(2))
    for path, text in ((old, b"old"), (newer, b"newer")):
        path.write_bytes(b"2026-01-01T00:00:00Z stdout F " + text + b"\n")
    old.with_name(f"{old.name}.gz").write_bytes(gzip.compress(old.read_bytes()))
    newer.with_name(f"{newer.name}.tmp").write_bytes(b"a b c half written\n")

    assert b"".join(_earlier(tmp_path, current=0)) == b"old\nnewer\n"
