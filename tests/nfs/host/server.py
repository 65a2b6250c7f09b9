"""The guest that serves: exports with quotas, made as an administrator would make them by hand."""

from __future__ import annotations

import itertools
import os

from tests.nfs.host.guest import Guest

FOR_ALL = "rw,sync,no_subtree_check,no_root_squash,insecure"
"""Export options under which every user of every client does what he may on a local disk."""
_numbers = itertools.count(1000 + os.getpid() % 1000 * 100)


class NFSServer(Guest):
    """An NFS host with a disk of XFS, project quotas on, at /srv."""

    def export(self, name: str, *, clients: str = "*", options: str = FOR_ALL, quota_bytes: int = 0) -> str:
        """Make /srv/NAME, with a hard limit of quota_bytes if that is not 0, and export it; its path."""
        number = next(_numbers)
        path = f"/srv/{name}"
        script = f"mkdir -p -m 0777 {path}\nchmod 0777 {path}\n"
        if quota_bytes:
            script += (
                f"xfs_quota -x -c 'project -s -p {path} {number}' /srv >/dev/null\n"
                f"xfs_quota -x -c 'limit -p bhard={quota_bytes} {number}' /srv\n"
            )
        script += f"echo '{path} {clients}({options},fsid={number})' >/etc/exports.d/{name}.exports\nexportfs -ar\n"
        self.shell(f"{script}sync\n")  # it is to outlive a power cut
        return path

    def unexport(self, name: str) -> None:
        """Take an export and what is below it away."""
        self.shell(f"rm -f /etc/exports.d/{name}.exports\nexportfs -ar\nrm -rf /srv/{name}\n")
