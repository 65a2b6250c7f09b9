from __future__ import annotations

import pytest

from datastore.csi.plan import Bind, Unmount, publish
from datastore.mountinfo import parse
from tests.promises import promise

ROOT = "22 1 8:1 / / rw - ext4 /dev/sda rw"
STAGED = "30 22 0:50 / /k/staging rw,nosuid - fuse.datastore data rw"
STAGED_RO = "30 22 0:50 / /k/staging ro,nosuid - fuse.datastore data ro"
SHOWN = "31 22 0:50 / /k/target rw,nosuid - fuse.datastore data rw"
SHOWN_RO = "31 22 0:50 / /k/target ro,nosuid - fuse.datastore data rw"
STALE = "31 22 0:49 / /k/target rw,nosuid - fuse.datastore data rw"

BIND = Bind("/k/staging", "/k/target", False)
BIND_RO = Bind("/k/staging", "/k/target", True)
CLEAR = Unmount("/k/target")


@promise("S-88")
@pytest.mark.parametrize(
    ("lines", "read_only", "steps"),
    [
        ([STAGED], False, [BIND]),
        ([STAGED], True, [BIND_RO]),
        ([STAGED, SHOWN], False, []),
        ([STAGED, SHOWN_RO], True, []),
        ([STAGED, SHOWN], True, [CLEAR, BIND_RO]),
        ([STAGED, SHOWN_RO], False, []),
        ([STAGED, STALE], False, [CLEAR, BIND]),
        ([STAGED, SHOWN, SHOWN], False, [CLEAR, BIND]),
        ([STAGED_RO, SHOWN_RO], False, []),
        ([STALE], False, [CLEAR, BIND]),
    ],
)
def test_the_steps_lead_from_what_is_mounted_to_what_is_wanted(
    lines: list[str], read_only: bool, steps: list[object]
) -> None:
    table = parse("\n".join([ROOT, *lines]))
    assert publish(table, "/k/staging", "/k/target", read_only=read_only) == steps
