"""The CSI driver as the kubelet meets it: real processes, real gRPC, real mounts, a real S3 server."""
