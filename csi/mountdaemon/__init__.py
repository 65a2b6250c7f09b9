"""The mount daemon: a process in its own pod that starts and supervises the mounts, so that they outlive the plugin."""
