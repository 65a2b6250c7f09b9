"""A mounted NFS export (version 3) over libnfs: the server is the file system; a request is about one NFS call."""
