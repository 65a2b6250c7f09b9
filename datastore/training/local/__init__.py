"""Runs TrainingJobs on this machine, each replica as a process or a container."""
