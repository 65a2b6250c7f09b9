"""Processes of mounts are killed under a load that checks that no byte is lost."""
