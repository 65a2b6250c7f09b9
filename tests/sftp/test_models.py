"""Models in a directory of an SSH server: saves and aliases from two mounts of it, as from two machines, at once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from datastore.models.progress import Progress
from datastore.models.verifying import verify
from tests.contract.test_model_storage import INCREMENT
from tests.modelstores import Home
from tests.promises import promise
from tests.sftp.mounts import mounted
from tests.sftp.sshd import SSHServer

pytestmark = [pytest.mark.fuse, pytest.mark.timeout(1800)]
LIMIT_S = 400.0


@promise("S-373", "S-380")
def test_saves_and_aliases_from_two_mounts_at_once(sshd: SSHServer, clean_environment: Path) -> None:
    """Twenty saves get twenty numbers and forty increments are forty."""
    served = clean_environment / "models-served"
    for each in ("models", "m"):
        (served / each).mkdir(parents=True)
    (served / "m" / "counter").write_bytes(b"0")
    with mounted(sshd, served, clean_environment) as one, mounted(sshd, served, clean_environment) as two:
        roots = [str(each.path) for each in (one, two)]
        savers = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.contract.savers", roots[number % 2], "5", str(number)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for number in range(4)
        ]
        said = [each.communicate("go\n", timeout=LIMIT_S)[0] for each in savers]
        assert [each.returncode for each in savers] == [0] * 4
        counters = [subprocess.Popen([sys.executable, "-c", INCREMENT, root]) for root in roots]
        assert [each.wait(LIMIT_S) for each in counters] == [0, 0]
    assert sorted(int(number) for each in said for number in each.split()) == list(range(1, 21))
    assert (served / "m" / "counter").read_bytes() == b"40"
    models = Home("directory", root=served).models()
    assert [each.version for each in models.versions("digits")] == list(range(20, 0, -1))
    assert verify(models, "digits", 20, Progress())[1] == []
