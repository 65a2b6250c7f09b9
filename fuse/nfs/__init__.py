"""A mount of an NFS export (version 3) over libnfs: the server is the file system, and a request is about one call."""
