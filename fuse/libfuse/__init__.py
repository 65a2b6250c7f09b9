"""The second way to serve a file system: through libfuse, where the protocol of /dev/fuse can't be spoken directly."""
