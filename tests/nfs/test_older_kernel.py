"""Our own engine under the guests' kernel, Linux 6.1, which can't send a request to a second server."""

from __future__ import annotations

import sys

import pytest

from tests.nfs.host.guest import CHECKOUT, Guest
from tests.promises import promise

pytestmark = [pytest.mark.fuse, pytest.mark.timeout(900, func_only=True)]

CHOSEN = "calls_in_flight or (replaced_on_request and this) or used_and_stopped"
"""Of tests/mount/test_engine_supervisor.py: the death of a server, a restart, and an ordinary mount."""


@promise("S-59", "S-424")
def test_a_server_that_dies_or_is_replaced(nfs_client: Guest) -> None:
    said = nfs_client.shell(
        f"""
        cd {CHECKOUT}
        uname -r
        export TMPDIR=/tmp PYTHONDONTWRITEBYTECODE=1 HYPOTHESIS_STORAGE_DIRECTORY=/tmp/hypothesis
        timeout 600 {sys.executable} -m pytest -q -p no:cacheprovider \\
            tests/mount/test_engine_supervisor.py -k '{CHOSEN}'
        """,
        timeout_s=700.0,
    )
    print(said)
    assert said.startswith("6.1.")
    assert "3 passed" in said
