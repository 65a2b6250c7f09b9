"""The CSI driver csi.datastore.dev: the node plugin, and the mount daemon (mountdaemon/), which outlives the plugin."""
