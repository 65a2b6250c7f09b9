"""The command: `datastore` and `kubectl-datastore`. One file per verb; the mount itself is served by another process."""
