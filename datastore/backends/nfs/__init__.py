"""NFS exports that are made for a Datastore: on an NFS host over SSH, or by a server in the cluster."""
