"""NFS: the test bed, the binding, the mount over libnfs."""
