"""A real NFS host and a real NFS client: two user-mode-linux guests in a network namespace of their own.

The first guest runs knfsd, mountd, rpcbind and sshd over a disk with XFS project quotas; it is the host that the SSH
provisioner works on and that mounts are tried against. The second one's kernel has the NFS client, and it sees this
machine's files (this checkout and its Python included) at their own paths, read-only: the kernel-mount path of the
node plugin runs there. Both are kernels of their own: they may be switched off, cut from power and started again.

Nothing is installed on this machine for them: Debian's packages are fetched once and unpacked into the tools' cache,
and lie over this machine's /usr in the guests.

    python -m tests.nfs.host up        starts them, says how to reach them, and leaves them running
    python -m tests.nfs.host ssh server exportfs -v
    python -m tests.nfs.host down

Tests take the fixtures of tests/nfs/host/fixtures.py, which share both guests in a session.
Needs root (network namespaces, tap devices).
"""
