"""The data plane: our FUSE engine, the file system that shows objects as directories, and the storage adapters.

Import it as `datastore.fuse`; modules inside use relative imports only (docs/decisions/0001-packaging.md).
"""
