"""The CSI driver's package; its parts arrive with the cluster half of the project (docs/ARCHITECTURE.md)."""
