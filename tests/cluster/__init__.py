"""A real single-node Kubernetes for tests, made from scratch in namespaces of its own, without a registry of images."""
