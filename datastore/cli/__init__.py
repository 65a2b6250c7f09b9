"""The command `datastore`, also installed as `kubectl-datastore`. One file per verb; another process serves a mount."""
