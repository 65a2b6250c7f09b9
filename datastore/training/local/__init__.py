"""The driver for this machine: each replica is a process."""
