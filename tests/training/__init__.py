"""TrainingJobs on this machine, with real mounts, real processes and the real frameworks."""
