"""Our FUSE engine: speaks the kernel protocol on /dev/fuse, without libfuse. It knows `..ops`, not what is served."""
