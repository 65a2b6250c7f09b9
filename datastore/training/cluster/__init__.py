"""TrainingJobs in Kubernetes: the driver for commands, and what they share with the controller, such as names."""
