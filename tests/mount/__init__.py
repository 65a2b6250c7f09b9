"""Real mounts through the kernel (and through libfuse)."""
