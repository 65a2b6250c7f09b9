"""The test bed itself: a real server and a real kernel client, quotas that hold, and ends of all kinds."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.nfs.host.guest import CHECKOUT, Guest
from tests.nfs.host.server import NFSServer

pytestmark = pytest.mark.timeout(900, func_only=True)


def test_a_kernel_client_mounts_an_export_and_meets_its_quota(
    nfs_host: NFSServer, nfs_client: Guest, export: Callable[..., str]
) -> None:
    path = export(quota_bytes=8 << 20)
    nfs_client.shell(f"mkdir -p /mnt/quota; mount -t nfs -o vers=4.2 {nfs_host.address}:{path} /mnt/quota")
    try:
        size = nfs_client.shell("df --output=size --block-size=1M /mnt/quota | tail -n 1")
        assert int(size) == 8
        with pytest.raises(AssertionError, match=r"No space left on device|Disk quota exceeded"):
            nfs_client.shell("dd if=/dev/zero of=/mnt/quota/file bs=1M count=16 conv=fsync")
    finally:
        nfs_client.shell("umount -f /mnt/quota")
    stored = int(nfs_host.shell(f"du -sm {path} | cut -f 1"))
    assert 7 <= stored <= 8


def test_the_repository_runs_in_the_client(nfs_client: Guest) -> None:
    said = nfs_client.run(str(CHECKOUT / ".venv/bin/python"), "-c", "import datastore; print(datastore.__file__)")
    assert said.strip() == str(CHECKOUT / "datastore/__init__.py")


@pytest.mark.parametrize("orderly", [True, False], ids=["reboot", "power-cut"])
def test_exports_and_what_was_synced_outlive(nfs_host: NFSServer, export: Callable[..., str], orderly: bool) -> None:
    path = export(quota_bytes=8 << 20)
    nfs_host.shell(f"echo kept >{path}/file; sync")
    nfs_host.reboot(orderly=orderly)
    assert nfs_host.shell(f"cat {path}/file; exportfs -s | grep -c '^{path} '").split() == ["kept", "1"]
    assert "8192" in nfs_host.shell("xfs_quota -x -c 'report -p -N' /srv")
