"""Makes and ends mounts on this machine, from a manifest to a directory and back, for the command and the launcher."""
