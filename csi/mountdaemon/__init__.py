"""The mount daemon: a process of its own pod that starts and watches the mounts, so that they outlive the plugin."""
