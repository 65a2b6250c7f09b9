"""Training clusters in Kubernetes: the names that the controller and the command agree on, and the command's driver."""
