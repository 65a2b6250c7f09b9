"""The data plane: our FUSE engine, the semantics of a directory over objects, and the storage adapters.

Import it as `datastore.fuse`; modules inside use relative imports only (docs/decisions/0001-packaging.md).
"""
