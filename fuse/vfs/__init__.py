"""The file system: only this package decides what objects mean as names, attributes, listings and files."""
