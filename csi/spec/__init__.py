"""Messages of CSI and of the kubelet's plugin registration: generated from the .proto files here, never edited."""
