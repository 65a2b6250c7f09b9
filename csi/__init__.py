"""The CSI driver csi.datastore.dev: the node plugin, and the mount daemon (mountdaemon/) that outlives it."""
