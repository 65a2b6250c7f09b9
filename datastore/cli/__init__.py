"""The command: `datastore` and `kubectl-datastore`. One file per verb; another process serves the mount."""
