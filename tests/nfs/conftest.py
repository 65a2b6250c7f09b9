"""Everything here shares the NFS host."""

from tests.nfs.host.fixtures import export, nfs_bed, nfs_client, nfs_host

__all__ = ["export", "nfs_bed", "nfs_client", "nfs_host"]
