"""Many Datastores and many nodes on a cluster that has only its API server: what each costs; docs/SCALE.md."""
