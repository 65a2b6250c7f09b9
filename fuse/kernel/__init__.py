"""Our FUSE engine: the kernel protocol on /dev/fuse, without libfuse. Knows `..ops`, nothing of what is served."""
