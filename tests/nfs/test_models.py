"""Models in an export: saves and aliases by exclusive creation and rename, from a real kernel client and the host."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.contract.test_model_storage import INCREMENT
from tests.nfs.host.guest import CHECKOUT, Guest
from tests.nfs.host.server import NFSServer
from tests.promises import promise

pytestmark = pytest.mark.timeout(900, func_only=True)
PYTHON = str(CHECKOUT / ".venv/bin/python")
LIMIT_S = 400.0
LOOK = """
import sys
from pathlib import Path
from datastore.models.progress import Progress
from datastore.models.verifying import verify
from tests.modelstores import Home

models = Home("directory", root=Path(sys.argv[1])).models()
found = list(models.versions("digits"))
assert not any(there.saving for there in models.numbers("digits").values())
assert verify(models, "digits", found[0].version, Progress())[1] == []
print(*sorted(each.version for each in found))
"""


@promise("S-373", "S-380")
def test_saves_and_aliases_from_two_machines_at_once(
    nfs_host: NFSServer, nfs_client: Guest, export: Callable[..., str]
) -> None:
    """Twenty saves get twenty numbers and forty increments are forty, over NFS and on the host's disk."""
    path = export()
    nfs_client.shell(f"mkdir -p /mnt/models; mount -t nfs -o vers=4.2 {nfs_host.address}:{path} /mnt/models")
    try:
        nfs_client.shell("mkdir /mnt/models/models /mnt/models/m; echo -n 0 >/mnt/models/m/counter")
        places = [(nfs_client, "/mnt/models"), (nfs_host, path)]

        def run(guest: Guest, *words: str) -> str:
            line = shlex.join([PYTHON, *words])
            return guest.shell(f"cd {CHECKOUT}; echo go | PYTHONDONTWRITEBYTECODE=1 {line}", LIMIT_S)

        def saves(number: int) -> str:
            guest, root = places[number % 2]
            return run(guest, "-m", "tests.contract.savers", root, "5", str(number))

        with ThreadPoolExecutor(4) as pool:
            numbers = [int(each) for said in pool.map(saves, range(4)) for each in said.split()]
            list(pool.map(lambda place: run(place[0], "-c", INCREMENT, place[1]), places))

        assert sorted(numbers) == list(range(1, 21))
        for guest, root in places:
            assert run(guest, "-c", LOOK, root).split() == [str(number) for number in range(1, 21)]
            assert guest.shell(f"cat {root}/m/counter") == "40"
    finally:
        nfs_client.shell("umount -f /mnt/models")
