"""Our FUSE engine: the kernel protocol spoken on /dev/fuse, without libfuse. Knows `..ops` and nothing of what is served."""
