"""The second way to serve a file system: through libfuse, where /dev/fuse can't be spoken directly."""
