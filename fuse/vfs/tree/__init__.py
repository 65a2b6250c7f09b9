"""The nodes that the kernel knows, their names and attributes, and what all parts of the file system share."""
