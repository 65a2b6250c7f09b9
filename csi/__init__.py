"""The CSI driver csi.datastore.dev: what the kubelet asks of volumes, answered by mounts that a keeper's host holds."""
