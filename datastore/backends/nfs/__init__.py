"""NFS exports of their own: made on a host over SSH, or served from within the cluster."""
